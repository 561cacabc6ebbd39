"""Tools in a chat: the functions of a Python file, and what the user is shown and asked before a call."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlm.chat.messages import ToolCall
from mlxlm.chat.terminal.output import print_status
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line

if TYPE_CHECKING:  # pydantic takes time to import
    from mlxlm.chat.tools import CallableTool

_MAX_RESULT_LINES, _MAX_RESULT_CHARS = 6, 500  # that are shown


def functions_of(paths: Sequence[Path]) -> list[CallableTool]:
    """Run Python files, and return their functions whose names don't begin with an underscore, as tools.

    Raises:
        GenerationError: A file can't be read or run, or has no such function, or one that can't be a tool.
    """
    if not paths:
        return []
    from mlxlm.chat.tools import callable_tools

    return list(callable_tools([function for path in paths for function in _functions_of(path)]).values())


def _functions_of(path: Path) -> Sequence[Callable[..., Any]]:
    spec = importlib.util.spec_from_file_location(f"mlxlm_tools_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise GenerationError(f"{path} is not a Python file", "a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and type hints look
    sys.path.append(str(path.absolute().parent))  # it may import modules beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever it raises
        problem = one_line(f"{path} can't be run: {type(error).__name__}: {error}")
        raise GenerationError(problem, f"python {path}") from error
    own = [value for value in vars(module).values() if inspect.isfunction(value) and value.__module__ == spec.name]
    if not (public := [function for function in own if not function.__name__.startswith("_")]):
        raise GenerationError(f"{path} has no functions", "def get_time() -> str: ...")
    return public


def interruptible(tool: CallableTool, interrupts: Callable[[], Any]) -> CallableTool:
    """Return a tool whose calls Ctrl-C ends, with an error as their result. `interrupts`: see `raise_interrupts`."""

    def run(arguments: Mapping[str, Any]) -> Any:
        try:
            with interrupts():
                return tool.run(arguments)
        except KeyboardInterrupt:
            raise GenerationError("the user stopped this call") from None

    return replace(tool, run=run)


@dataclass
class Permissions:
    """Asks the user before each call.

    Attributes:
        ask: Reads a line from the terminal after a question.
        always: Functions that run without a question; None for all.
        stop: Set by Ctrl-C at the question, to end the answer.
    """

    ask: Callable[[str], str] | None = None
    always: set[str] | None = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)

    def allow(self, call: ToolCall) -> bool:
        """Whether a call, which is shown already, may run."""
        if self.always is None or call.name in self.always:
            return True
        try:
            answer = self.ask("Run it? [y/N, a: always this function] ").strip().lower() if self.ask else ""
        except EOFError:
            return False
        except KeyboardInterrupt:
            self.stop.set()
            return False
        if answer in ("a", "always"):
            self.always.add(call.name)
        return answer in ("y", "yes", "a", "always")


def call_text(call: ToolCall) -> str:
    """Return a call as in Python."""
    try:
        arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call.parsed_arguments().items())
    except MlxlmError:
        arguments = call.arguments
    return f"{call.name}({arguments})"


def show_result(result: str) -> None:
    """Print the beginning of a result."""
    lines = result[:_MAX_RESULT_CHARS].splitlines()[:_MAX_RESULT_LINES]
    shown = "\n".join(lines)
    print_status(f"→ {shown}{' …' if len(shown) < len(result.rstrip()) else ''}")
