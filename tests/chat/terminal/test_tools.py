"""Tools in a chat: functions of a file, questions before calls, and how calls are shown."""

import os
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from mlxlm.chat.messages import ToolCall
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.commands import run_command
from mlxlm.chat.terminal.output import print_info
from mlxlm.chat.terminal.repl import Repl
from mlxlm.chat.terminal.screen import open_screen
from mlxlm.chat.terminal.settings import Settings
from mlxlm.chat.terminal.terminal_chat import raise_interrupts, stream_answer
from mlxlm.chat.terminal.tools import Permissions, call_text, functions_of, interruptible, show_result
from mlxlm.chat.tools import CallableTool
from mlxlm.generation import GenerationChunk
from mlxlm.utils.errors import GenerationError
from tests.chat.test_chat_tools import made_to_call  # noqa: F401 - a fixture
from tests.run_command import run_command as run_mlxlm

CALL = ToolCall("1", "get_weather", '{"city": "Zürich", "days": [1, 2]}')
TOOLS = '''
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path

@dataclass
class City:
    name: str

def get_weather(city: City, days: int = 1) -> str:
    """Return the weather."""
    return _helper(city.name) * days

def _helper(name):
    return f"sunny in {name} "
'''


def test_functions_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "weather.py"
    path.write_text(
        TOOLS.replace("import Path", "import Path\nfrom sunny_helper import SUNNY").replace("sunny in", "{SUNNY} in")
    )
    (tmp_path / "sunny_helper.py").write_text("SUNNY = 'sunny'")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tool,) = functions_of([path])
    assert (tool.name, tool.description) == ("get_weather", "Return the weather.")
    assert tool.call({"city": {"name": "Paris"}, "days": 2}) == "sunny in Paris sunny in Paris "


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", "def f(): ...", "is not a Python file"),
        ("a.py", "1/0", r"can't be run: ZeroDivisionError: division by zero \(try: python "),
        ("a.py", "def f(", "can't be run: SyntaxError"),
        ("a.py", "import sys; sys.exit(2)", "can't be run: SystemExit: 2"),
        ("a.py", "from os.path import join\ndef _f(): ...", "has no functions"),
        ("missing.py", None, "is not a Python file"),
    ],
)
def test_files_without_functions(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(GenerationError, match=problem):
        functions_of([tmp_path / name])


def test_each_call_needs_a_permission():
    answers = iter(["n", "", "Y", "a"])
    permissions = Permissions(lambda question: next(answers))
    assert [permissions.allow(CALL) for _ in range(5)] == [False, False, True, True, True]  # the last isn't asked for
    with pytest.raises(StopIteration):
        permissions.allow(ToolCall("2", "other", "{}"))
    assert Permissions(None).allow(CALL) is False and Permissions(None, None).allow(CALL) is True
    for error in (EOFError, KeyboardInterrupt):
        permissions = Permissions(lambda question, error=error: (_ for _ in ()).throw(error))
        assert permissions.allow(CALL) is False
        assert permissions.stop.is_set() == (error is KeyboardInterrupt)  # Ctrl-C also ends the answer


def test_ctrl_c_ends_a_call_and_not_the_chat():
    def wait(arguments):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)

    tool = interruptible(CallableTool("wait", run=wait), raise_interrupts)
    before = signal.getsignal(signal.SIGINT)
    assert tool.call({}) == "error: the user stopped this call"
    assert signal.getsignal(signal.SIGINT) is before


def test_calls_and_results_are_shown_between_parts_of_the_answer(capsys):
    def start(on_prefill):
        yield GenerationChunk("Let me see.")
        yield GenerationChunk("", tool_call=CALL)
        yield GenerationChunk("", tool_call=CALL, tool_result="sunny\nwarm")
        yield GenerationChunk("", tool_call=CALL)  # without text before it
        yield GenerationChunk("", tool_call=CALL, tool_result="x" * 900)
        yield GenerationChunk("It is sunny.", finish_reason="eos")

    chat = SimpleNamespace(prompt_tokens=3)
    assert stream_answer(chat, start, partial(open_screen, "dim", False), threading.Event()) == "eos"
    out, err = capsys.readouterr()
    assert out == "Let me see.\nIt is sunny.\n"
    call = 'get_weather(city="Zürich", days=[1, 2])\n'
    assert err == f"{call}→ sunny\nwarm\n{call}→ {'x' * 500} …\n"


def test_a_chat_with_tools(lm, made_to_call, capsys, tmp_path):  # noqa: F811
    answers = iter(["y", "n"])
    repl = Repl(Chat(lm, temperature=0, max_tokens=90), Settings(), Autosave(), None, {}, interactive=True)
    repl.permissions.ask = lambda question: next(answers)
    repl.use_tools([CallableTool("tell_time", "Tell the time.", run=lambda arguments: "12:00")])
    made_to_call(2)
    repl.send("What time is it?")
    assert "tell_time()\n→ 12:00\ntell_time()\n→ error: the user did not allow this call\n" in capsys.readouterr().err
    assert [message.role for message in repl.chat.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    run_command(repl, f"/save {tmp_path / 's.jsonl'}")
    capsys.readouterr()
    run_command(repl, f"/load {tmp_path / 's.jsonl'}")  # shows the last exchange; the tools stay
    assert "user:\nWhat time is it?\nassistant:\ntell_time()\n" in capsys.readouterr().err
    run_command(repl, "/tools")
    assert capsys.readouterr().err == "tell_time()  Tell the time.\n"
    run_command(repl, f"/export {tmp_path / 'chat.md'}")
    assert "## Assistant\n\n`tell_time()`\n\n## Tool\n\n12:00\n" in (tmp_path / "chat.md").read_text()


def test_tools_on_the_command_line(model_folder, tmp_path):
    (tmp_path / "weather.py").write_text(TOOLS)
    arguments = ["chat", model_folder, "-n", "3", "--tools", tmp_path / "weather.py"]
    refused = run_mlxlm(*arguments, "-p", "Hi")
    assert refused.returncode == 2 and b"need --yes without a terminal" in refused.stderr
    listed = run_mlxlm(*arguments, "--yes", stdin=b"/tools\n")
    assert (listed.returncode, listed.stderr) == (0, b"get_weather(city, days)  Return the weather.\n")
    cut_off = run_mlxlm(*arguments, "--yes", "--seed", 5, "-p", "Hi")  # within a character
    assert cut_off.returncode == 0 and cut_off.stdout.endswith("�\n".encode())


def test_what_a_model_wrote_can_not_control_the_terminal(capsys):
    for arguments in ('{"a": "\\u001b[2J"}', "\x1b[2J"):
        print_info(call_text(ToolCall("1", "f", arguments)))
    show_result("\x1b[2J")
    assert "\x1b" not in capsys.readouterr().err
