"""`mlxlm quickstart`: from text to a chat with a model, in one command."""

from __future__ import annotations

import shlex
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.cli.generation_options import load_model
from mlxlm.cli.options import PATH, SectionedCommand, on_bad_input_option, option
from mlxlm.cli.training_options import print_skipped
from mlxlm.utils.errors import DataError
from mlxlm.utils.formatting import human_bytes, human_seconds

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.train import Run

# In two minutes on two CPU cores, many steps of the smallest model reach a lower loss than fewer steps of a larger one:
# on a megabyte of plays, after 90 seconds, 2.20 bits per byte for 0.3m and 2.28 for 1m.
# The sequence length is the context of the chat: a few questions and answers.
PRESET, VOCAB_SIZE = "0.3m", 1024  # less if the text supports fewer tokens
MAX_SEQ_LENGTH = 512


@click.command(cls=SectionedCommand)
@click.argument("data", nargs=-1)
@option("Training", "--out", PATH, "New folder for the run.  [default: mlxlm-quickstart]")
@option("Training", "--minutes", float, "Time for tokenizer, data and training.", default=2.0)
@on_bad_input_option("Training")
@option("Chat", "--no-chat", bool, "Print one continuation instead of starting a chat.")
def quickstart(
    data: tuple[str, ...], out: Path | None, minutes: float, on_bad_input: str | None, no_chat: bool
) -> None:
    """Train a tokenizer and a small model, quantize it to 4 bits, and chat with it.

    It trains on DATA, text files, or on the language reference that comes with Python. No network is needed.
    """
    from mlxlm.cli.training import print_summary, run_training, stop_on_signal
    from mlxlm.generation import load
    from mlxlm.quantize import quantize

    if on_bad_input and not data:
        raise click.UsageError("--on-bad-input would have no effect: there is no DATA")
    out = out or _unused_name(Path("mlxlm-quickstart"))
    run = _new_run(data, out, minutes, on_bad_input or "stop")
    render.say(f"2. Training until {human_seconds(60 * minutes)} have passed (Ctrl-C saves and stops)")
    stop = stop_on_signal()
    print_summary(run_training(run, stop=stop), run)
    if stop.requested:
        return
    small = out / "4bit"
    render.say(f"3. Quantizing the best checkpoint to 4 bits, in {small}")
    report = quantize(run.path, small, bits=4)
    change = report.metrics and f"; {report.metrics.bits_per_byte_change:+.4f} bits per byte on the validation text"
    render.say(f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight{change or ''}")
    lm = load(small)
    _chat(lm, in_terminal=sys.stdin.isatty() and sys.stdout.isatty() and not no_chat)
    render.say(f"Chat with it again: mlxlm chat {shlex.quote(str(small))}")


def _new_run(data: tuple[str, ...], out: Path, minutes: float, on_bad_input: str) -> Run:
    from mlxlm.cli.training import phase
    from mlxlm.config.optimizers import OPTIMIZERS
    from mlxlm.data import DataOptions, Manifest
    from mlxlm.data.builtin import write_python_reference
    from mlxlm.families import load_preset
    from mlxlm.train import start_run
    from mlxlm.train.run_data import TooFewTokensError

    config = load_preset(PRESET, vocab_size=_vocab_size(data, on_bad_input))
    with tempfile.TemporaryDirectory() as folder:
        sources = list(data)
        settings: dict[str, float] = {"max_seq_length": MAX_SEQ_LENGTH}
        if not sources:
            sources = [str(Path(folder, "python-reference.jsonl"))]
            write_python_reference(Path(sources[0]))
            # The reference repeats itself, so a larger decay harms it, see `default_weight_decay`.
            settings["weight_decay"] = OPTIMIZERS["adamw"].weight_decay
        name = ", ".join(data) or "Python's language reference, as questions and answers"
        render.say(f"1. Training a tokenizer and a small model on {name}")
        text = DataOptions(sources, on_bad_input=on_bad_input)
        try:
            run = start_run(out, text, config, minutes=minutes, settings=settings, phase=phase)
        except TooFewTokensError as error:  # its hint is an option of pretrain
            raise DataError(error.message, "more text, or text that repeats itself less") from error
    print_skipped(Manifest.read(run.data).skipped)
    return run


def _vocab_size(data: tuple[str, ...], on_bad_input: str) -> int:
    """The largest vocabulary for the text: half of the default if it is short."""
    from mlxlm.data import BadInput, read_texts

    size = 0
    for piece in read_texts(data, on_bad=BadInput(on_bad_input)) if data else ():
        size += len(piece)
        if size >= 100_000:
            break
    if not data or size >= 100_000:
        return VOCAB_SIZE
    if size < 20_000:
        raise DataError(f"{', '.join(data)}: {size} characters are too few to learn from", "at least 20,000")
    return VOCAB_SIZE // 2


def _unused_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that doesn't exist."""
    return next(p for n in count(1) if not (p := path if n == 1 else Path(f"{path}-{n}")).exists())


def _chat(lm: LoadedModel, in_terminal: bool) -> None:
    """Start a chat in a terminal; elsewhere print one answer."""
    from mlxlm.chat.terminal.autosave import Autosave
    from mlxlm.chat.terminal.repl import open_repl
    from mlxlm.chat.terminal.settings import Settings

    has_roles = lm.tokenizer.chat_template is not None  # trained on conversations
    settings = Settings(ask_on_overflow=in_terminal)
    repl = open_repl(lm, load_model, autosave=Autosave(unnamed=in_terminal), settings=settings)
    if not in_terminal:
        question = "What is assert?" if has_roles else "The"
        render.say(f"4. {question}")
        repl.once(question)
        return
    what = "Ask it, for example: What is assert?" if has_roles else "Start a text, and the model continues it."
    about = "4. Chat. A model this small gets the form right, but seldom the facts. /help lists the commands."
    if code := repl.run([about, what]):
        sys.exit(code)
