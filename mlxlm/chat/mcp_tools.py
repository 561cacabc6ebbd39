"""Tools of MCP servers: programs that offer functions over the Model Context Protocol, on their standard streams."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxlm.chat.tools import CallableTool
from mlxlm.utils.errors import GenerationError, one_line

if TYPE_CHECKING:
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
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs a traceback for each line that isn't a message
        self._command = command
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, ClientSession, list[CallableTool]]]
        self._started = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="mlxlm-mcp", daemon=True)
        self._thread.start()
        self._loop, self._end, self._session, self.tools = self._started.result()

    def close(self) -> None:
        """End the server."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._log.close()

    async def _run(self) -> None:
        """Run the server until `close`."""
        try:
            if not (words := shlex.split(self._command)):
                raise ValueError("the command is empty")
            from mcp import ClientSession, StdioServerParameters, stdio_client

            parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
            async with stdio_client(parameters, self._log) as streams, ClientSession(*streams) as session:
                async with asyncio.timeout(START_SECONDS):
                    await session.initialize()
                    tools = await self._list_tools(session)
                end = asyncio.Event()
                self._started.set_result((asyncio.get_running_loop(), end, session, tools))
                await end.wait()
        except BaseException as error:  # exceptions of a task group, too
            if not self._started.done():
                self._started.set_exception(self._start_error(error))

    async def _list_tools(self, session: ClientSession) -> list[CallableTool]:
        from mcp.types import PaginatedRequestParams

        tools: list[CallableTool] = []
        cursor = None
        while True:
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            for tool in page.tools:
                run = partial(self._call, tool.name)
                tools.append(CallableTool(tool.name, tool.description or "", tool.input_schema, run=run))
            if (cursor := page.next_cursor) is None:
                return tools

    def _start_error(self, error: BaseException) -> GenerationError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = f"no answer in {START_SECONDS} seconds" if isinstance(error, TimeoutError) else str(error)
        self._log.seek(0)
        log = self._log.read()[-_MAX_LOG_BYTES:].strip().rpartition("\n")[2]
        problem = f"the MCP server {self._command} can't be started: {reason}{f': {log}' if log else ''}"
        return GenerationError(one_line(problem), "the same command in a shell")

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, in any thread. KeyboardInterrupt cancels the call."""
        call = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, dict(arguments)), self._loop)
        try:
            result: Any = call.result()
        finally:
            call.cancel()
        text = "\n".join(_text_of(block) for block in result.content)
        if result.is_error:
            raise GenerationError(text or "the tool failed")
        return text


def _text_of(block: Any) -> str:
    """Return a part of a result as text; an image or a sound is only mentioned."""
    text = getattr(block, "text", None) or getattr(getattr(block, "resource", None), "text", None)
    return f"[{block.type}]" if text is None else str(text)
