"""The chat in a terminal, or over a pipe: the only part of the library that writes to either.

`loop.run` is the conversation of a person, `turns.answer` one answer as plain text. Importing the package is cheap.
"""

from mlxlm.chat.terminal.output import printable, write

__all__ = ["printable", "write"]
