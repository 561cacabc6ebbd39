"""`mlxlm launch`: starts a server, and an editor or agent connected to it; the server ends with the client."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.clients import CLIENTS, Client, Endpoint
from mlxlm.cli.options import MODEL, SectionedCommand
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import PlatformError

_STOP_SECONDS = 10.0  # that the server may take to stop
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

    The server ends with the client. Its messages go to a file, whose last line is shown if it fails.
    """
    settings = CLIENTS[client]
    with tempfile.TemporaryDirectory(prefix="mlxlm-") as folder:
        command = _command(settings, client)
        with _server([model] if model else [], Path(folder, "server.log")) as url:
            endpoint = Endpoint.find(url, None)
            if settings.arguments is None:
                file = Path(folder, settings.file.name)
                file.write_text(settings.settings(endpoint), encoding="utf-8")
                arguments = ["--config", str(file)]
            else:
                arguments = settings.arguments(endpoint)
            render.say(f"{client} uses {endpoint.model} at {endpoint.url}")
            code = _run(
                [command, *arguments, *click.get_current_context().obj],
                {**os.environ, **settings.environment(endpoint)},
            )
    raise click.exceptions.Exit(code)


def _command(settings: Client, name: str) -> str:
    """The path of the client's program."""
    if settings.merge and settings.arguments is None:
        raise PlatformError(f"{name} reads its settings from its file only", f"mlxlm connect {name} --write")
    if (program := shutil.which(settings.program)) is None:
        raise PlatformError(f"there is no program {settings.program}", settings.install)
    return program


@contextmanager
def _server(models: list[str], log: Path) -> Iterator[str]:
    """Run a server on a free port in a process of its own, and yield its address."""
    command = python_command("-m", "mlxlm.cli.main", "serve", *models, "--port", "0", "--log-level", "warning")
    with log.open("w") as output, render.spinner("starting the server"):
        # A session of its own: Ctrl-C in the client is none of its business.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=python_environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            while not (found := re.search(r"http://\S+(?=/v1)", log.read_text(errors="replace"))):
                if process.poll() is not None:
                    *_, last = ["", *log.read_text(errors="replace").splitlines()]
                    raise PlatformError(f"the server didn't start: {last.removeprefix('error: ')}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    try:
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the client in the foreground, and return its exit code as a shell does."""
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is the client's, which has its own
    try:
        process = subprocess.Popen(command, env=environment)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    finally:
        signal.signal(signal.SIGINT, handler)
    return code if code >= 0 else 128 - code
