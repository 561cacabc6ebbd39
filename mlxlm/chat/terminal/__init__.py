"""The chat in a terminal, or over a pipe: the only part of the library that writes to either.

`loop.Repl` is the conversation of a person, `turns.answer` one answer of it. Importing the package is cheap.
"""

from mlxlm.chat.terminal.output import write

__all__ = ["write"]
