"""`mlxlm quickstart`: text in, a chatting model out, in one command."""

from __future__ import annotations

import shlex
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.cli.run_options import ON_BAD_INPUT, print_skipped
from mlxlm.utils.errors import DataError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.chat.terminal.repl import Repl
    from mlxlm.generation import LoadedModel

# In two minutes on two CPU cores many small steps of the smallest model end lower than fewer of larger ones:
# on a megabyte of plays, after 90 seconds, 2.20 bits per byte for 0.3m and 2.28 for 1m.
# The length is the context of the chat: a few questions and answers.
PRESET, VOCABULARY = "0.3m", 1024  # tokens at most: as many as the text supports
SETTINGS = {"max_seq_length": 512}


@click.command()
@click.argument("data", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="A new folder for the run.  [default: mlxlm-quickstart]")
@click.option("--minutes", type=float, default=2.0, show_default=True, help="For tokenizer, data and training.")
@ON_BAD_INPUT
@click.option("--no-chat", is_flag=True, help="Print a continuation at the end, also in a terminal.")
def quickstart(
    data: tuple[str, ...], out: Path | None, minutes: float, on_bad_input: str | None, no_chat: bool
) -> None:
    """Train a tokenizer and a small model, quantize it to 4 bits, and chat with it.

    On DATA (text files), or on the language reference that every Python carries: no network is needed.
    """
    from mlxlm.cli.training import StopRequest, phase, print_summary, run_training
    from mlxlm.config.optimizers import OPTIMIZERS
    from mlxlm.data import Manifest
    from mlxlm.data.builtin import write_python_reference
    from mlxlm.families import load_preset
    from mlxlm.generation import load
    from mlxlm.quantize import quantize
    from mlxlm.tokenizer import load as load_tokenizer
    from mlxlm.train import start_run
    from mlxlm.train.start import TooFewTokensError

    if on_bad_input and not data:
        raise click.UsageError("--on-bad-input would have no effect: there is no DATA")
    out = out or _free_name(Path("mlxlm-quickstart"))
    policy = on_bad_input or "stop"
    config = load_preset(PRESET, vocab_size=_vocabulary(data, policy))
    with tempfile.TemporaryDirectory() as folder:
        sources = list(data)
        if not sources:
            sources = [str(Path(folder, "python-reference.jsonl"))]
            write_python_reference(Path(sources[0]))
        text = ", ".join(data) or "Python's language reference, as questions and answers"
        render.say(f"1. A tokenizer and a small model, from {text}")
        # The reference repeats itself, so that more decay harms it, see `default_weight_decay`.
        own = {} if data else {"weight_decay": OPTIMIZERS["adamw"].weight_decay}
        try:
            run = start_run(
                out, sources, config, minutes=minutes, on_bad_input=policy, settings={**SETTINGS, **own}, phase=phase
            )
        except TooFewTokensError as error:  # its hint is an option of pretrain
            raise DataError(error.message, "more text, or text that repeats itself less") from error
    print_skipped(Manifest.read(run.data).skipped)
    render.say(f"2. Training until {minutes:g} minutes are over (Ctrl-C saves and stops)")
    stop = StopRequest()
    print_summary(run_training(run, load_tokenizer(run.path), stop=stop), run)
    if stop.requested:
        return
    small = out / "4bit"
    render.say(f"3. Quantizing the best checkpoint to 4 bits, in {small}")
    report = quantize(run.path, small, bits=4)
    change = report.metrics.bits_per_byte_change
    size = f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight"
    render.say(f"{size}; {change:+.4f} bits per byte on the validation text by the smaller weights")
    lm = load(small)
    if sys.stdin.isatty() and sys.stdout.isatty() and not no_chat:
        _chat(lm)
    else:
        _continuation(lm)
    render.say(f"Chat with it again: mlxlm chat {shlex.quote(str(small))}")


def _vocabulary(data: tuple[str, ...], on_bad_input: str) -> int:
    """The most tokens for the tokenizer, fewer for a short text, which has fewer frequent words."""
    from mlxlm.data import BadInput, texts

    size = 0
    for piece in texts(data, on_bad=BadInput(on_bad_input)) if data else ():
        size += len(piece)
        if size >= 100_000:
            break
    if not data or size >= 100_000:
        return VOCABULARY
    if size < 20_000:
        raise DataError(f"{', '.join(data)}: {size} characters are too few to learn from", "at least 20,000")
    return VOCABULARY // 2


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that doesn't exist."""
    return next(p for n in count(1) if not (p := path if n == 1 else Path(f"{path}-{n}")).exists())


def _chat(lm: LoadedModel) -> None:
    greeting = "4. Chat. A model of this size gets the form right, seldom the facts. /help lists the commands.\n"
    greeting += "Ask it, for example: What is assert?" if _has_roles(lm) else "Begin a text, and the model goes on."
    if code := _repl(lm, in_terminal=True).run(greeting.split("\n")):
        sys.exit(code)


def _continuation(lm: LoadedModel) -> None:
    question = "What is assert?" if _has_roles(lm) else "The"
    render.say(f"4. {question}")
    _repl(lm, in_terminal=False).once(question)


def _repl(lm: LoadedModel, in_terminal: bool) -> Repl:
    from mlxlm.chat.session import Chat
    from mlxlm.chat.terminal.autosave import Autosave
    from mlxlm.chat.terminal.repl import Repl
    from mlxlm.chat.terminal.settings import Settings
    from mlxlm.cli.speculation_options import load_model

    return Repl(Chat(lm), Settings(ask_on_overflow=in_terminal), Autosave(unnamed=in_terminal), load_model)


def _has_roles(lm: LoadedModel) -> bool:
    """Whether it was trained on conversations."""
    return lm.tokenizer.chat_template is not None
