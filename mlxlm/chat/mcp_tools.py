"""Tools of MCP servers: programs that offer functions over the Model Context Protocol, on their standard streams."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from mlxlm.chat.tools import CallableTool
from mlxlm.utils.errors import GenerationError, one_line

if TYPE_CHECKING:
    import mcp
    from mcp import ClientSession

START_SECONDS = 60  # a server may be downloaded first, as by npx
_MAX_LOG_BYTES = 2000  # of the server's last messages in an error


class McpServer:
    """An MCP server, as a child process of this one, and its tools.

    Attributes:
        tools: Its tools.
    """

    def __init__(self, command: str):
        """Start a server.

        Args:
            command: The command and its arguments, quoted as for a shell, which isn't used.

        Raises:
            GenerationError: The package mcp is missing, or the command isn't an MCP server.
        """
        try:
            import mcp  # noqa: F401 - fails here rather than in the thread
        except ImportError:
            raise GenerationError("MCP servers need the package mcp", "pip install 'mlxlm[mcp]'") from None
        from anyio.from_thread import start_blocking_portal

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs a traceback for each line that isn't a message
        with ExitStack() as resources:  # which end with an error, and with Ctrl-C
            log = resources.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            self._portal = resources.enter_context(start_blocking_portal(name="mlxlm-mcp"))
            try:
                connection = self._portal.wrap_async_context_manager(_connect(command, log))
                self._session, tools = resources.enter_context(connection)
            except Exception as error:  # exceptions of a task group, too
                raise _start_error(command, error, log) from error
            self._resources = resources.pop_all()
        self.tools = [
            CallableTool(tool.name, tool.description or "", tool.input_schema, run=partial(self._call, tool.name))
            for tool in tools
        ]

    def close(self) -> None:
        """End the server."""
        self._resources.close()

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, in any thread. KeyboardInterrupt cancels the call."""
        call = self._portal.start_task_soon(self._session.call_tool, name, dict(arguments))
        try:
            result: Any = call.result()
        finally:
            call.cancel()
        text = "\n".join(_text_of(block) for block in result.content)
        if result.is_error:
            raise GenerationError(text or "the tool failed")
        return text


@asynccontextmanager
async def _connect(command: str, log: TextIO) -> AsyncIterator[tuple[ClientSession, list[mcp.types.Tool]]]:
    """Start a server, whose standard error goes to `log`, and yield the session and the tools."""
    from mcp import ClientSession, StdioServerParameters, stdio_client

    if not (words := shlex.split(command)):
        raise ValueError("the command is empty")
    parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
    async with stdio_client(parameters, log) as streams, ClientSession(*streams) as session:
        async with asyncio.timeout(START_SECONDS):
            await session.initialize()
            tools = await _list_tools(session)
        yield session, tools


async def _list_tools(session: ClientSession) -> list[mcp.types.Tool]:
    from mcp.types import PaginatedRequestParams

    tools: list[mcp.types.Tool] = []
    cursor = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            return tools


def _start_error(command: str, error: BaseException, log: TextIO) -> GenerationError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = f"no answer in {START_SECONDS} seconds" if isinstance(error, TimeoutError) else str(error)
    log.seek(0)
    last = log.read()[-_MAX_LOG_BYTES:].strip().rpartition("\n")[2]
    problem = f"the MCP server {command} can't be started: {reason}{f': {last}' if last else ''}"
    return GenerationError(one_line(problem), "the same command in a shell")


def _text_of(block: Any) -> str:
    """Return a part of a result as text; an image or a sound is only mentioned."""
    text = getattr(block, "text", None) or getattr(getattr(block, "resource", None), "text", None)
    return f"[{block.type}]" if text is None else str(text)
