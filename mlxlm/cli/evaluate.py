"""`mlxlm evaluate`: how well a model predicts a text, or answers questions with choices."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from mlxlm.cli import render
from mlxlm.cli.run_options import ON_BAD_INPUT, print_skipped
from mlxlm.cli.tokenizer import SOURCES_HELP
from mlxlm.utils.formatting import human_seconds


@click.command(epilog=SOURCES_HELP)
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--context-length", type=click.IntRange(1), help="Tokens of a window (default: the model's, at most 2048)."
)
@click.option(
    "--stride", type=click.IntRange(1), help="Tokens a window moves on by (default: half of --context-length)."
)
@click.option("--text-column", metavar="NAME", help="Of tables and JSON lines.  [default: text]")
@ON_BAD_INPUT
@click.option(
    "--multiple-choice", type=click.Path(path_type=Path), metavar="FILE", help="Questions with choices: JSON lines."
)
@click.option("--out", type=click.Path(path_type=Path), help="New file for what is chosen: a JSON line per question.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(model: str, texts: tuple[str, ...], multiple_choice: Path | None, as_json: bool, **options: Any) -> None:
    """Measure MODEL on raw text: loss, perplexity, bits per byte and bits per character; or with --multiple-choice the share
    of questions that it answers rightly.

    Every token is predicted once, from a window that slides over the text: with context - stride tokens before it, or
    all there are. A smaller stride is slower, and the loss is mostly lower, since tokens have more text before them.
    compare and quantize use the default windows.

    Lines of --multiple-choice are {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}; the answer's index begins at 0.
    """
    given = {f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None}
    if bool(texts) == bool(multiple_choice):
        raise click.UsageError("give TEXT files, or - for stdin, or --multiple-choice FILE")
    idle = given - {"--out"} if multiple_choice else given & {"--out"}
    if idle:
        reason = "with --multiple-choice no TEXT is read" if multiple_choice else "--multiple-choice is not given"
        raise click.UsageError(f"{' and '.join(sorted(idle))} would have no effect: {reason}")
    if multiple_choice:
        _evaluate_multiple_choice(model, multiple_choice, options["out"], as_json)
    else:
        _evaluate_texts(model, texts, options, as_json)


def _evaluate_texts(model: str, texts: tuple[str, ...], options: dict[str, Any], as_json: bool) -> None:
    from mlxlm.data import BadInput, documents, total_bytes
    from mlxlm.evaluate.text import TextLoss, evaluate_text
    from mlxlm.evaluate.windows import window_lengths
    from mlxlm.generation import load

    total = total_bytes(texts)
    lm = load(model)
    stdin = sys.stdin.buffer
    context_length, stride = window_lengths(
        lm.config.max_position_embeddings, options["context_length"], options["stride"]
    )
    found: dict[str, TextLoss] = {}
    bad = BadInput(options["on_bad_input"] or "stop")
    started = time.perf_counter()
    with render.bytes_progress("Evaluating", total) as advance:
        for text in dict.fromkeys(texts):
            source = documents([text], stdin=stdin, advance=advance, text_column=options["text_column"], on_bad=bad)
            found["stdin" if text == "-" else text] = evaluate_text(
                lm, source, context_length=context_length, stride=stride
            )
    print_skipped(bad.skipped)
    whole = sum(found.values(), TextLoss())
    if as_json:
        parts = {"texts": {name: loss.to_dict() for name, loss in found.items()}} if len(found) > 1 else {}
        lengths = {"context_length": context_length, "stride": stride}
        render.emit_json({"model": model, **whole.to_dict(), **lengths, "skipped": bad.skipped, **parts})
        return
    shown = {**found, "all": whole} if len(found) > 1 else found
    header = ("text", "tokens", "loss", "perplexity", "bits per byte", "bits per character")
    render.print_result(render.table([(name, *_row(loss)) for name, loss in shown.items()], header))
    render.result(render.windows(context_length, stride))
    seconds = time.perf_counter() - started
    render.say(f"{whole.tokens} tokens in {human_seconds(seconds)}, {whole.tokens / seconds:.0f} tokens/s")


def _row(found) -> tuple[str, ...]:
    numbers = (f"{found.perplexity:.4g}", f"{found.bits_per_byte:.4f}", f"{found.bits_per_character:.4f}")
    return (str(found.tokens), f"{found.loss:.4f}", *numbers)


def _evaluate_multiple_choice(model: str, path: Path, out: Path | None, as_json: bool) -> None:
    from contextlib import nullcontext

    from mlxlm.evaluate.multiple_choice import Accuracy, answer, read_questions
    from mlxlm.generation import load
    from mlxlm.utils.errors import DataError, os_errors_as
    from mlxlm.utils.files import atomic_new_file, json_line

    with os_errors_as(DataError, "read", path):
        size = path.stat().st_size
    lm = load(model)
    answered = []
    with nullcontext() if out is None else atomic_new_file(out, DataError) as file:
        with render.bytes_progress("Answering", size) as advance:
            for one in answer(lm, read_questions(path, advance)):
                answered.append(one)
                if file is not None:
                    file.write(json_line(one.to_dict()))
        found = Accuracy.of(answered)
    if as_json:
        render.emit_json({"model": model, **found.to_dict(), "results": [one.to_dict() for one in answered]})
        return
    rows = [
        (name, f"{share:.1%}", f"± {found.stderr(share):.1%}")
        for name, share in (("accuracy", found.accuracy), ("accuracy by bytes", found.accuracy_by_bytes))
    ]
    rows.append(("chance", f"{found.random_accuracy:.1%}", ""))
    render.print_result(render.table(rows, (f"{found.questions} questions", "", "")))
