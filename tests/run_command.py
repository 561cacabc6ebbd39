"""Runs commands of the command line in this process."""

import contextlib
import io
import sys
import warnings
from subprocess import CompletedProcess
from unittest import mock

from mlxlm.cli.main import _run


def run_command(*arguments, stdin: bytes = b"") -> CompletedProcess:
    """Like `subprocess.run`, without the seconds that a new interpreter takes to import everything."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    stdin_file = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", stdin_file),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # which pytest turns on
        try:
            code = _run([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
    return CompletedProcess(arguments, code, out.buffer.getvalue(), err.buffer.getvalue())


def run(*arguments, stdin: bytes = b"") -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command."""
    done = run_command(*arguments, stdin=stdin)
    return done.returncode, done.stdout.decode(), done.stderr.decode()
