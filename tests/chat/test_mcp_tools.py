"""Tools of MCP servers, with a real one."""

import os
import shlex
import signal
import sys
import threading

import pytest

from mlxlm.chat.mcp_tools import McpServer
from mlxlm.utils.errors import GenerationError

SERVER = '''
import sys, time
from mcp.server.mcpserver import MCPServer
server = MCPServer("test")

@server.tool()
def get_weather(city: str) -> str:
    """Return the weather."""
    print("called", file=sys.stderr)
    return f"sunny in {city}"

@server.tool()
def fail(a: int) -> int:
    raise ValueError("no")

@server.tool()
def wait() -> str:
    time.sleep(20)
    return "done"

server.run()
'''
WAITING = "import sys; alive = open(sys.argv[1], 'w'); print(file=alive, flush=True); sys.stdin.read()"


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("mcp")
    path = tmp_path / "a server.py"
    path.write_text(SERVER)
    server = McpServer(shlex.join([sys.executable, str(path)]))
    yield server
    server.close()


def test_tools_are_listed_called_and_interrupted(server, capfd):
    tools = {tool.name: tool for tool in server.tools}
    assert list(tools) == ["get_weather", "fail", "wait"]
    weather = tools["get_weather"]
    assert weather.description == "Return the weather."
    assert weather.parameters["properties"]["city"]["type"] == "string"
    assert weather.call({"city": "Paris"}) == "sunny in Paris"
    assert tools["fail"].call({"a": 1}).startswith("error: Error executing tool fail")
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        tools["wait"].call({})
    assert capfd.readouterr() == ("", "")  # what the server logs


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/bin/false", "can't be started: Connection closed"),
        ("no-such-program x", "No such file"),
        ("'x", "No closing quotation"),
        ("", "the command is empty"),
        (f"{sys.executable} -c 1/0", "ZeroDivisionError"),
    ],
)
def test_commands_that_are_not_servers(command, problem):
    pytest.importorskip("mcp")
    with pytest.raises(GenerationError, match=problem):
        McpServer(command)


def test_ctrl_c_while_a_server_starts_ends_it(tmp_path):
    pytest.importorskip("mcp")
    os.mkfifo(tmp_path / "alive")  # the server keeps it open

    def interrupt():
        with open(tmp_path / "alive") as alive:
            alive.readline()
            os.kill(os.getpid(), signal.SIGINT)
            alive.read()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        McpServer(shlex.join([sys.executable, "-c", WAITING, str(tmp_path / "alive")]))
    thread.join(10)
    assert not thread.is_alive()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(GenerationError, match=r"need the package mcp \(try: pip install 'mlxlm\[mcp\]'\)"):
        McpServer("x")
