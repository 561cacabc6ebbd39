"""The `mlxlm` command: imports only the command that is called, and prints errors as one line."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem

from mlxlm import __version__
from mlxlm.backend.error_text import describe_error
from mlxlm.checkpoint import download
from mlxlm.cli.completion import COMPLETION_VARIABLE, answer, install_option
from mlxlm.cli.restart import Restart
from mlxlm.cli.suggestions import missing_value, suggest_bits, suggest_command, suggest_option
from mlxlm.utils.errors import MlxlmError, one_line

# The command and its module have the same name. The help is here so that `mlxlm --help` imports no command.
GROUPS = {
    "Run": {
        "chat": "Chat with a model in the terminal.",
        "generate": "Continue a prompt, or answer a file of requests.",
        "serve": "Serve OpenAI's and Anthropic's APIs and a chat page.",
        "connect": "Configure an editor or agent for a running server.",
        "launch": "Start a server, and an editor or agent that uses it.",
        "models": "List, download and remove models; list presets.",
    },
    "Train": {
        "quickstart": "Train a small model in minutes, and chat with it.",
        "pretrain": "Train a model from scratch.",
        "finetune": "Fine-tune a model on conversations.",
        "grpo": "Train a model with a reward function.",
        "draft": "Train a draft head, for faster generation.",
        "speedrun": "Train for a fixed time, and get a verifiable score.",
        "evaluate": "Evaluate a model on text or multiple choice.",
        "report": "Write an HTML report of training runs.",
    },
    "Data": {
        "prepare": "Tokenize text into shards for training.",
        "tokenizer": "Train, inspect and apply tokenizers.",
    },
    "Convert": {
        "convert": "Convert a checkpoint to another format.",
        "quantize": "Quantize a model, and report the loss of quality.",
        "inspect": "Show format, architecture and size of a checkpoint.",
        "compare": "Compare two models: outputs, layers and weights.",
        "upload": "Upload a model to the Hugging Face hub.",
    },
    "Research": {
        "plan": "Estimate parameters, FLOPs, memory, time and disk.",
        "scaling": "Fit scaling laws to a grid of small runs.",
        "sweep": "Find the best options of pretrain for your data.",
        "compare-architectures": "Train variants of a model on the same data.",
    },
    "Machine": {
        "doctor": "Show device and memory, or check that all works.",
        "kernels": "List or benchmark the kernels of this machine.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command, and give it and its subcommands the option --debug."""
        if name not in COMMANDS:
            return None
        attribute = name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"mlxlm.cli.{attribute}"), attribute)
        for leaf in (command, *getattr(command, "commands", {}).values()):
            if not any(p.name == "debug" for p in leaf.params):
                leaf.params.append(debug_option())
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands without importing them, and options."""
        names = {name: text for name, text in COMMANDS.items() if name.startswith(incomplete)}
        options = super().shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*(CompletionItem(name, help=text) for name, text in names.items()), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in groups, without importing them."""
        width = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


def debug_option() -> click.Option:
    """`--debug`, which all commands have."""
    text = "Print the full traceback of an error."
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=text, callback=_set_debug)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta["mlxlm.debug"] = True


@click.group(
    cls=LazyGroup,
    params=[install_option(), debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with mlxlm chat, or train a model of your own with mlxlm quickstart.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Train, quantize, serve and chat with language models on this machine, with MLX."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with 0 (done), 1 (failed), 2 (wrong usage), or 130 or 143 (interrupted)."""
    if sys.stderr is sys.__stderr__ and sys.__stderr__ is not None:
        sys.stderr = _ignore_write_errors(sys.__stderr__)
    sys.exit(answer(app) if COMPLETION_VARIABLE in os.environ else _run(args))


class _LenientFile(io.FileIO):
    """Drops what can't be written because the reader or the terminal is gone, or the disk is full."""

    def write(self, data: Any) -> int:
        """Write the data, or pretend to."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _ignore_write_errors(stream: TextIO) -> io.TextIOWrapper:
    """`stream` for messages, which aren't the result, so the command continues without them.

    It is unbuffered, because a signal handler can't write to a buffer while a line is being written to it.
    """
    raw = _LenientFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


def _run(args: list[str] | None) -> int:
    context, start_time = None, time.monotonic()
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # it is ignored under nohup
        signal.signal(signal.SIGHUP, _terminate)
    if sys.stderr is None:  # closed (2>&-): the result doesn't go there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # prints "?" for characters that the terminal lacks
    try:
        if sys.stdout is None:
            raise MlxlmError("standard output is closed", "a file, or /dev/null")
        args = sys.argv[1:] if args is None else args
        with app.make_context("mlxlm", list(args)) as context:
            context.meta["mlxlm.start_time"] = start_time  # for commands with a time limit
            # rich, which takes a while to import, is needed for a download only
            download.show_progress = lambda *args: importlib.import_module("mlxlm.cli.render").show_download(*args)
            app.invoke(context)
        sys.stdout.flush()
        return 0
    except Restart as restart:  # the context is closed: nothing of this process is left
        restart.run()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        _show_usage_error(error)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`mlxlm generate ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # one line for every failure
        if context is not None and context.meta.get("mlxlm.debug"):
            traceback.print_exc()
        print_error(error)
        return 1
    finally:
        MlxlmError.show_argument = None


def _show_usage_error(error: click.ClickException) -> None:
    """Print the usage of the command, and the error as all others are printed."""
    message, context, hint = error.format_message(), getattr(error, "ctx", None), None
    if context is not None:
        print(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", file=sys.stderr)
        if isinstance(error, click.NoSuchOption):
            message, hint = f"no option {error.option_name}", suggest_option(error.option_name, context.command)
        elif isinstance(error, click.NoSuchCommand):
            names = context.command.list_commands(context)
            hint = suggest_command(error.command_name, context.command_path, names)
            message = f"no command {error.command_name}"
        elif isinstance(error, click.BadOptionUsage) and error.message.endswith("requires an argument."):
            message, hint = missing_value(error.option_name, context.command)
        elif isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
            hint = suggest_bits(message, error.param)
    print(f"error: {message}{f' (try: {hint})' if hint else ''}", file=sys.stderr)


def print_error(error: Exception) -> None:
    """Print an error as one line; a process of a distributed run other than the first adds its rank."""
    rank = os.environ.get("MLX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    print(f"{'' if rank == '0' else f'rank {rank}: '}error: {describe_error(error)}", file=sys.stderr, flush=True)


def _terminate(number: int, _frame: object) -> None:
    """Unwind the stack, so that half-written folders are removed."""
    if number == signal.SIGHUP:  # the shell and the system may each send one when a terminal is closed
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _show_warning(message: Warning | str, *_: Any, **_options: Any) -> None:
    print(f"warning: {one_line(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    main()
