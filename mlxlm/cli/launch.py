"""`mlxlm launch`: starts a server, and an editor or agent connected to it; the server ends with the client.

As a module this is the process of the server.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from mlxlm.checkpoint.download import resolve
from mlxlm.cli import render
from mlxlm.cli.clients import CLIENTS
from mlxlm.cli.options import MODEL, SectionedCommand
from mlxlm.cli.running_server import Endpoint
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import PlatformError

_STOP_SECONDS = 10.0  # that the server and the client may take to stop
_POLL_SECONDS = 0.05


class _LaunchCommand(SectionedCommand):
    """Keeps what follows `--` for the client: click itself would count it among the arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what precedes `--`."""
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@click.command(cls=_LaunchCommand, options_metavar="")
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.argument("model", required=False, type=MODEL)
def launch(client: str, model: str | None) -> None:
    """Start a server for MODEL, and CLIENT connected to it: mlxlm launch CLIENT MODEL -- ARGUMENTS OF CLIENT.

    The server ends with the client, whose exit code is that of the command. Without MODEL, it serves all models on this
    machine.
    """
    settings = CLIENTS[client]
    if settings.merge and settings.launch is None:
        raise PlatformError(f"{client} reads its settings from its file only", f"mlxlm connect {client} --write")
    if shutil.which(settings.program) is None:
        raise PlatformError(f"{client} is not installed: there is no program {settings.program}", settings.install)
    if model is not None:
        resolve(model)  # shows its download
    with tempfile.TemporaryDirectory(prefix="mlxlm-") as folder, _server([model] if model else []) as url:
        endpoint = Endpoint.find(url, None)
        render.say(f"{client} uses {endpoint.model} at {endpoint.url}")
        command, variables = settings.start_without_settings(endpoint, Path(folder))
        code = _run([*command, *click.get_current_context().obj], {**os.environ, **variables})
    raise click.exceptions.Exit(code)


@contextmanager
def _server(models: list[str]) -> Iterator[str]:
    """Run a server on a free port in a process of its own, and yield its address.

    It stops when its standard input is closed: at the end of the block, and if this process is killed.
    """
    command = python_command("-m", __name__, "serve", *models, "--port", "0", "--log-level", "warning")
    with (
        tempfile.TemporaryFile() as log,
        # A session of its own: Ctrl-C in the client is none of its business.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=python_environment(), start_new_session=True
        ) as process,
    ):
        with render.spinner("starting the server"):
            while True:
                has_ended = process.poll() is not None
                messages = os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")  # it goes on writing at the end
                if found := re.search(r"http://\S+(?=/v1)", messages):
                    break
                if has_ended:
                    last = messages.strip().rpartition("\n")[2].removeprefix("error: ")
                    raise PlatformError(f"the server didn't start: {last}")
                time.sleep(_POLL_SECONDS)
        yield found[0]
        if process.poll() is not None:
            render.warn([f"the server ended before the client, with exit code {process.returncode}"])


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the client in the foreground, and return its exit code as a shell does."""
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is the client's, which has its own
    terminal = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        with subprocess.Popen(command, env=environment) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGINT, handler)
        with suppress(termios.error):  # the terminal was closed
            if terminal and terminal != termios.tcgetattr(0):  # the client was killed
                termios.tcsetattr(0, termios.TCSANOW, terminal)
    return code if code >= 0 else 128 - code


def _stop_with_parent() -> None:
    """Stop this process when its standard input is closed."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    from mlxlm.cli.main import main

    threading.Thread(target=_stop_with_parent, daemon=True).start()
    main()
