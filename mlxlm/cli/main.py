"""The `mlxlm` command: finds the sub-command, imports only that, and turns errors into one line."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import time
import traceback
import warnings

import click

from mlxlm import __version__
from mlxlm.backend.error_text import describe_error
from mlxlm.utils.errors import MlxlmError

# name: (module:attribute, one-line help). The help stands here so that `mlxlm --help` imports nothing else.
COMMANDS = {
    "quickstart": ("mlxlm.cli.quickstart:quickstart", "Train a small model on this machine and chat with it."),
    "chat": ("mlxlm.cli.chat:chat", "Chat with a model in the terminal."),
    "generate": ("mlxlm.cli.generate:generate", "Continue a prompt, for shells and scripts."),
    "tokenizer": ("mlxlm.cli.tokenizer:tokenizer", "Train, inspect and apply tokenizers."),
    "prepare": ("mlxlm.cli.prepare:prepare", "Turn text into memory-mapped token shards."),
    "plan": ("mlxlm.cli.plan:plan", "Say what a model costs: parameters, operations, memory, time, disk."),
    "pretrain": ("mlxlm.cli.pretrain:pretrain", "Train a model from scratch."),
    "finetune": ("mlxlm.cli.finetune:finetune", "Tune a model on conversations, so that it can hold one."),
    "compare-architectures": (
        "mlxlm.cli.compare_architectures:compare_architectures",
        "Train variants of a model on the same data, and draw their curves.",
    ),
    "scaling": ("mlxlm.cli.scaling:scaling", "Fit scaling laws to a grid of small runs, and plan larger ones."),
    "evaluate": ("mlxlm.cli.evaluate:evaluate", "Measure a model on text or on questions with choices."),
    "report": ("mlxlm.cli.report:report", "Show training runs: curves, samples, settings, in one HTML file."),
    "convert": ("mlxlm.cli.convert:convert", "Write any checkpoint as a folder, GGUF or llama2.c file, verified."),
    "quantize": ("mlxlm.cli.quantize:quantize", "Write any checkpoint with fewer bits, and show what that costs."),
    "inspect": ("mlxlm.cli.inspect:inspect", "Show what a checkpoint is: format, architecture, size, tokenizer."),
    "compare": ("mlxlm.cli.compare:compare", "Show how far two models are apart: output, layers, weights."),
    "presets": ("mlxlm.cli.presets:presets", "List the model sizes that ship with mlxlm."),
    "kernels": ("mlxlm.cli.kernels:kernels", "Show or measure what computes norms and attention here."),
    "doctor": ("mlxlm.cli.doctor:doctor", "Show what this machine offers: device, BLAS, memory."),
}

DEBUG_HELP = "Show the whole traceback of an error."


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when the help is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        for leaf in (command, *getattr(command, "commands", {}).values()):
            if not any(p.name == "debug" for p in leaf.params):
                leaf.params.append(debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def debug_option() -> click.Option:
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=DEBUG_HELP, callback=_set_debug)


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_root().meta["mlxlm.debug"] = True


@click.group(
    cls=LazyGroup,
    params=[debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: mlxlm quickstart",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """mlxlm: train, quantize and chat with language models on this machine, with MLX."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    _open_standard_descriptors()
    sys.unraisablehook = _swallowed
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _lenient(sys.stderr)
    sys.exit(_run(args))


def _open_standard_descriptors() -> None:
    """Open the null device for standard streams that are closed (`<&-`): the next file that is opened, the model for
    instance, would else become one of them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


class _Lenient(io.FileIO):
    """What can't be written (the reader or the terminal is gone, the disk is full) is left out."""

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lenient(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """`stream` for messages, which aren't the result: the work goes on without them. It has no buffer, in which a
    signal's handler could not write while a line is being written."""
    raw = _Lenient(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


def _run(args: list[str] | None) -> int:
    context, start_time = None, time.monotonic()
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    if sys.stderr is None:  # closed (2>&-): the result is none of what is said there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" for it
    try:
        if sys.stdout is None:
            raise MlxlmError("standard output is closed", "a file, or /dev/null")
        with app.make_context("mlxlm", list(sys.argv[1:] if args is None else args)) as context:
            context.meta["mlxlm.start_time"] = start_time  # for commands that end on time
            app.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`mlxlm generate ... | head`): nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the last line of defence: one line for every failure
        if context is not None and context.meta.get("mlxlm.debug"):
            traceback.print_exc()
        print_error(error)
        return 1


def print_error(error: Exception) -> None:
    """The one line of a failure, with its number where this is one of a run's processes but the first."""
    rank = os.environ.get("MLX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    print(f"{'' if rank == '0' else f'rank {rank}: '}error: {describe_error(error)}", file=sys.stderr, flush=True)


def _terminate(_number: int, _frame: object) -> None:
    """SIGTERM unwinds, so that half-written folders are removed."""
    raise SystemExit(143)


def _swallowed(unraisable: sys.UnraisableHookArgs) -> None:
    """What a signal raised where nothing can be raised, such as in the callback of a weak reference, comes again."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
        return
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # seconds: by then that place is left


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr)
