"""`mlxlm quickstart`: from text to a chat with a model, in one command."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

import click
from rich.table import Table
from rich.text import Text

from mlxlm import generation, train
from mlxlm.cli import render
from mlxlm.cli.evaluate import small_world_scores
from mlxlm.cli.generation_options import load_model
from mlxlm.cli.options import (
    PATH,
    SectionedCommand,
    allow_sleep_option,
    data_option,
    option,
    reject_unused_options,
)
from mlxlm.cli.prepare import SMALL_WORLD_BYTES
from mlxlm.cli.training import phase, print_summary, run_training, stop_on_signal
from mlxlm.cli.training_options import print_read
from mlxlm.data.options import DataOptions
from mlxlm.data.small_world.corpus import held_out_questions, write_small_world
from mlxlm.data.sources import read_documents
from mlxlm.data.text import BadInput
from mlxlm.families import load_preset
from mlxlm.generation.loaded_model import GenerationConfig
from mlxlm.train.events import Step
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import unused_path
from mlxlm.utils.formatting import human_bytes, human_seconds, printable

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
_KINDS_SHOWN = ("stories", "sums", "questions about a text")
_MIN_CHARACTERS = 2_000
_PREVIEW_CHARACTERS = 100_000
_PREVIEW_PIECES = 8  # of a document, about 16,000 characters each
_MAX_PROMPT = 80  # characters
TEMPERATURE = 0.4  # a small model is seldom sure of anything but the right word
_FRACTIONS = (1 / 12, 1 / 3)  # of the time limit: 10 and 40 seconds of two minutes
_MAX_TOKENS = {True: 160, False: 40}  # of an answer, and of a continued text
_QUESTIONS_PER_KIND = 20
_SCHEMA = {"properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]}


@click.command(cls=SectionedCommand)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@option("Training", "--out", PATH, "New folder for the run.  [default: mlxlm-quickstart]")
@option("Training", "--minutes", float, "Time for tokenizer, data and training.", default=2.0)
@data_option("on_bad_input", "Training")
@allow_sleep_option("Training")
@option("Chat", "--no-chat", bool, "Don't start a chat.")
def quickstart(
    files: tuple[str, ...], out: Path | None, minutes: float, on_bad_input: str | None, no_chat: bool
) -> None:
    """Train a tokenizer and a small model, quantize it to 4 bits, and chat with it.

    It trains on FILE, texts or conversations of a few kB or more, or on built-in conversations in simple English. While
    it trains, it answers the same three prompts again and again, and at the end it shows how the answers improved. It
    needs no network.
    """
    from mlxlm.quantize import quantize

    reject_unused_options({"on_bad_input": on_bad_input}, (not files, ["on_bad_input"], "there is no FILE"))
    out = out or unused_path(Path("mlxlm-quickstart"))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "small-world.jsonl")
        if not files:
            write_small_world(corpus, SMALL_WORLD_BYTES)
        sources = files or (str(corpus),)
        text = Preview.read(sources, on_bad_input or "stop")
        what = ", ".join(files) or "the built-in corpus small-world"
        render.say(f"1. Training a tokenizer and a small model on {what}")
        run = _new_run(sources, text, out, minutes, on_bad_input or "stop")
    prompts = text.prompts if files else held_out_prompts()
    GenerationConfig({"temperature": TEMPERATURE}, prompts[0]).write(run.path)
    render.say(f"2. Training until {human_seconds(60 * minutes)} have passed (Ctrl-C saves and stops)")
    answers, stop = Answers(prompts, 60 * minutes), stop_on_signal()
    print_summary(run_training(run, stop=stop, on_step=answers.after_step), run)
    if stop.requested:
        raise click.exceptions.Exit(stop.exit_code)
    small = out / "4bit"
    render.say(f"3. Quantizing the best checkpoint to 4 bits, in {small}")
    report = quantize(run.path, small, bits=4)
    agreement = report.metrics and f", top-1 agreement {report.metrics.top1_agreement:.1%}"
    render.say(f"{human_bytes(report.bytes)}, {report.bits_per_weight:.2f} bits per weight{agreement or ''}")
    lm = generation.load(small)
    answers.finish(lm)
    render.say("4. What it learned")
    answers.print()
    if not files:
        label = "Asking new questions"
        render.print_small_world(small_world_scores(lm, label, _QUESTIONS_PER_KIND, temperature=TEMPERATURE))
    if sys.stdin.isatty() and sys.stdout.isatty() and not no_chat:
        _chat(lm)
    _print_commands(small, prompts[1], lm.tokenizer.chat_template is not None)


def _new_run(sources: Sequence[str], text: Preview, out: Path, minutes: float, on_bad_input: str) -> train.Run:
    from mlxlm.train.start import TooFewTokensError

    # The vocabulary and the rows are smaller for a short text, which has few examples of each token, and few rows.
    sizes = ((100_000, 1024, 256), (20_000, 512, 128), (0, 320, 64))
    vocab_size, length = next(chosen for characters, *chosen in sizes if text.size >= characters)
    config = load_preset(PRESET, vocab_size=vocab_size, **MODEL)
    settings = {"max_seq_length": length, **(CONVERSATION_SETTINGS if text.has_conversations else {})}
    try:
        data = DataOptions(sources, on_bad_input=on_bad_input)
        run = train.start_run(out, data, config, minutes=minutes, settings=settings, phase=phase)
    except TooFewTokensError as error:  # its hint is an option of pretrain
        raise DataError(error.message, "more text, or text that repeats itself less") from error
    print_read(run.data)
    return run


def _chat(lm: generation.LoadedModel) -> None:
    from mlxlm.chat.terminal.about import first_screen
    from mlxlm.chat.terminal.autosave import Autosave
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


class Preview(NamedTuple):
    """What the beginning of a text shows.

    Attributes:
        size: Characters, counted up to about 100,000.
        has_conversations: Whether it has messages.
        prompts: Three prompts: first questions of conversations, or else the first words of passages.
    """

    size: int
    has_conversations: bool
    prompts: list[str]

    @classmethod
    def read(cls, sources: Sequence[str], on_bad_input: str) -> Self:
        """Read the beginning of `sources`. Raises DataError if it can't be read, or is too short to learn from."""
        size, questions, words = 0, [], []
        for document in read_documents(sources, on_bad=BadInput(on_bad_input)):
            is_chat = document.messages is not None
            for piece in document.contents if is_chat else islice(document.pieces, _PREVIEW_PIECES):
                size += len(piece)
                words += piece.split()
            questions += [m["content"] for m in document.messages or () if m["role"] == "user"][:1]
            if size >= _PREVIEW_CHARACTERS:
                break
        if size < _MIN_CHARACTERS:
            problem = f"{', '.join(sources)}: {size} characters are too few to learn from"
            raise DataError(problem, f"at least {_MIN_CHARACTERS:,}")
        passages = questions or [" ".join(words[i : i + 4]) for i in range(len(words))] or [""]
        prompts = [" ".join(passages[i * len(passages) // 3].split()) for i in range(3)]
        shown = ["".join(filter(str.isprintable, prompt))[:_MAX_PROMPT] or "The" for prompt in prompts]
        return cls(size, bool(questions), shown)


def held_out_prompts() -> list[str]:
    """Return questions of the small world whose combination of words isn't trained on."""
    return [next(held_out_questions(kind)).question for kind in _KINDS_SHOWN]


class Answers:
    """Answers the prompts when some time of a run has passed.

    Args:
        prompts: Questions for a model with a chat template; for others beginnings of a text.
        seconds: Time limit of the run.
    """

    def __init__(self, prompts: Sequence[str], seconds: float):
        self._prompts, self._start = prompts, time.monotonic()
        self._due = [fraction * seconds for fraction in _FRACTIONS]
        self._columns: list[tuple[str, list[str]]] = []

    def after_step(self, step: Step, lm: generation.LoadedModel) -> None:
        """Answer the prompts if it is time: a callback of `train`."""
        if self._due and step.step < step.steps and time.monotonic() - self._start >= self._due[0]:
            seconds = time.monotonic() - self._start
            self._due = [due for due in self._due if due > seconds]
            self._columns.append((f"after {human_seconds(seconds)}", self._answer(lm)))

    def finish(self, lm: generation.LoadedModel) -> None:
        """Answer the prompts with the finished model."""
        self._columns.append(("at the end", self._answer(lm)))

    def print(self) -> None:
        """Print a row for each prompt on stdout, with a column for each time."""
        table = Table(show_lines=True)
        table.add_column("prompt", ratio=1)
        for title, _ in self._columns:
            table.add_column(title, ratio=2)
        for i, prompt in enumerate(self._prompts):
            table.add_row(Text(prompt), *(Text(printable(answers[i]).strip()) for _, answers in self._columns))
        render.stdout_console(width=None if sys.stdout.isatty() else 120).print(table)

    def _answer(self, lm: generation.LoadedModel) -> list[str]:
        from mlxlm.chat.generate import batch

        prompts, is_chat = self._prompts, lm.tokenizer.chat_template is not None
        answer = partial(batch, lm, max_tokens=_MAX_TOKENS[is_chat], temperature=TEMPERATURE, seed=0)
        if is_chat:
            results = answer(messages=[[{"role": "user", "content": prompt}] for prompt in prompts])
            return [result.text for result in results]
        return [prompt + result.text for prompt, result in zip(prompts, answer(prompts), strict=True)]
