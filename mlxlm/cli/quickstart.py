"""`mlxlm quickstart`: from text to a chat with a model, in one command."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.cli.generation_options import load_model
from mlxlm.cli.options import PATH, SectionedCommand, allow_sleep_option, is_given, on_bad_input_option, option
from mlxlm.cli.quickstart_answers import TEMPERATURE, Answers
from mlxlm.cli.quickstart_text import CORPORA, SMALL_WORLD, Preview, held_out_prompts, write_corpus
from mlxlm.cli.training_options import print_skipped
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import unused_path
from mlxlm.utils.formatting import human_bytes, human_seconds

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.train import Run

# In the same time on two CPU cores, two wide layers learn more than three narrow ones. With Qwen 3's norms of queries
# and keys, a model of this size learns to copy names much sooner: it answered 60% of new questions, without them 30%.
PRESET = "0.3m"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Rows of whole conversations that attend to themselves, of which only the answers are learned. Where a token attended
# to other conversations, too, the model learned no sums in the same time.
CONVERSATION_SETTINGS = {
    "packing": "best-fit",
    "document_mask": True,
    "mask_prompt": True,
    "batch_size": 4,
    "learning_rate": 8e-3,
}
_QUESTIONS_PER_KIND = 20
_SCHEMA = {"properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]}


@click.command(cls=SectionedCommand)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@option(
    "Training",
    "--corpus",
    CORPORA,
    "Built-in text to train on if there is no FILE: stories, questions, sums and spelling in simple English, or "
    "Python's language reference.",
    default=SMALL_WORLD,
)
@option("Training", "--out", PATH, "New folder for the run.  [default: mlxlm-quickstart]")
@option("Training", "--minutes", float, "Time for tokenizer, data and training.", default=2.0)
@on_bad_input_option("Training")
@allow_sleep_option("Training")
@option("Chat", "--no-chat", bool, "Don't start a chat.")
def quickstart(
    files: tuple[str, ...],
    corpus: str,
    out: Path | None,
    minutes: float,
    on_bad_input: str | None,
    no_chat: bool,
) -> None:
    """Train a tokenizer and a small model, quantize it to 4 bits, and chat with it.

    It trains on FILE, texts or conversations of a few kB or more, or on a built-in corpus. While it trains, it answers
    the same three prompts again and again; at the end you see how the answers changed. No network is needed.
    """
    from mlxlm.cli.training import print_summary, run_training, stop_on_signal
    from mlxlm.generation import load
    from mlxlm.generation.generation_config import GenerationConfig
    from mlxlm.quantize import quantize

    if files and is_given("corpus"):
        raise click.UsageError("--corpus would have no effect: there is a FILE")
    if on_bad_input and not files:
        raise click.UsageError("--on-bad-input would have no effect: there is no FILE")
    is_small_world = not files and corpus == SMALL_WORLD
    out = out or unused_path(Path("mlxlm-quickstart"))
    with tempfile.TemporaryDirectory() as folder:
        sources = files or (str(write_corpus(corpus, Path(folder))),)
        text = Preview.read(sources, on_bad_input or "stop")
        what = ", ".join(files) or f"the built-in corpus {corpus}"
        render.say(f"1. Training a tokenizer and a small model on {what}")
        run = _new_run(sources, text, out, minutes, on_bad_input or "stop")
    prompts = held_out_prompts() if is_small_world else text.prompts
    GenerationConfig({"temperature": TEMPERATURE}, prompts[0]).write(run.path)
    render.say(f"2. Training until {human_seconds(60 * minutes)} have passed (Ctrl-C saves and stops)")
    answers, stop = Answers(prompts, 60 * minutes), stop_on_signal()
    print_summary(run_training(run, stop=stop, on_step=answers.after_step), run)
    if stop.requested:
        raise click.exceptions.Exit(stop.exit_code)
    small = out / "4bit"
    render.say(f"3. Quantizing the best checkpoint to 4 bits, in {small}")
    report = quantize(run.path, small, bits=4)
    same = report.metrics and f", the same most likely token in {report.metrics.top1_agreement:.1%} of the text"
    render.say(f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight{same or ''}")
    lm = load(small)
    answers.finish(lm)
    render.say("4. What it learned")
    answers.print()
    if is_small_world:
        _print_scores(lm)
    if sys.stdin.isatty() and sys.stdout.isatty() and not no_chat:
        _chat(lm)
    _print_commands(small, prompts[1], lm.tokenizer.chat_template is not None)


def _new_run(sources: Sequence[str], text: Preview, out: Path, minutes: float, on_bad_input: str) -> Run:
    from mlxlm.cli.training import phase
    from mlxlm.data import DataOptions, Manifest
    from mlxlm.families import load_preset
    from mlxlm.train import start_run
    from mlxlm.train.start import TooFewTokensError

    # The vocabulary and the rows are smaller for a short text, which has few examples of each token, and few rows.
    sizes = ((100_000, 1024, 256), (20_000, 512, 128), (0, 320, 64))
    vocab_size, length = next(
        (vocab_size, length) for characters, vocab_size, length in sizes if text.size >= characters
    )
    config = load_preset(PRESET, vocab_size=vocab_size, **MODEL)
    settings = {"max_seq_length": length, **(CONVERSATION_SETTINGS if text.has_conversations else {})}
    try:
        run = start_run(
            out,
            DataOptions(sources, on_bad_input=on_bad_input),
            config,
            minutes=minutes,
            settings=settings,
            phase=phase,
        )
    except TooFewTokensError as error:  # its hint is an option of pretrain
        raise DataError(error.message, "more text, or text that repeats itself less") from error
    print_skipped(Manifest.read(run.data).skipped)
    return run


def _print_scores(lm: LoadedModel) -> None:
    from mlxlm.evaluate.small_world import evaluate_small_world

    with render.phases_progress() as progress:
        scores = evaluate_small_world(
            lm,
            _QUESTIONS_PER_KIND,
            temperature=TEMPERATURE,
            progress=lambda done, total: progress("Asking new questions", done, total),
        )
    render.print_small_world(scores)


def _chat(lm: LoadedModel) -> None:
    from mlxlm.chat.terminal.autosave import Autosave
    from mlxlm.chat.terminal.first_screen import first_screen
    from mlxlm.chat.terminal.repl import open_repl
    from mlxlm.chat.terminal.settings import Settings

    settings, overflow = Settings(ask_on_overflow=False), {"context_overflow": "drop"}  # the context is short
    repl = open_repl(lm, load_model, autosave=Autosave(unnamed=True), settings=settings, chat_arguments=overflow)
    if code := repl.run(["5. Chat", *first_screen(repl.chat)]):
        sys.exit(code)


def _print_commands(model: Path, prompt: str, is_chat: bool) -> None:
    name = shlex.quote(str(model))
    render.say("Next steps:")
    render.say(f"  mlxlm chat {name}")
    if is_chat:
        render.say(f"  mlxlm generate {name} -p {shlex.quote(prompt)} --json-schema {shlex.quote(json.dumps(_SCHEMA))}")
    render.say(f"  mlxlm serve {name}")
