"""`mlxlm evaluate`: measure how well a model predicts a text, or answers multiple-choice questions."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm import generation
from mlxlm.checkpoint.locations import checkpoint_step, is_run_folder, locate
from mlxlm.cli import render
from mlxlm.cli.options import (
    MODEL,
    PATH,
    SOURCES_HELP,
    SectionedCommand,
    adapter_option,
    data_option,
    given_values,
    json_option,
    offline_option,
    option,
    reject_unused_options,
)
from mlxlm.cli.training_options import print_skipped
from mlxlm.data import Document
from mlxlm.data.sources import read_documents, total_bytes, unseekable_source
from mlxlm.data.text import BadInput
from mlxlm.report import REPORT_FILE
from mlxlm.utils.errors import DataError, os_errors_as
from mlxlm.utils.files import atomic_new_file
from mlxlm.utils.formatting import human_seconds
from mlxlm.utils.json_files import json_line

if TYPE_CHECKING:
    from mlxlm.evaluate.loss import TextLoss
    from mlxlm.evaluate.small_world import KindScore
    from mlxlm.evaluate.suite.estimates import Estimate
    from mlxlm.evaluate.suite.suite import Score, SuiteResult

_WINDOW_OPTIONS = ("context_length", "stride", "adapt", "adapt_learning_rate")
_TEXT_OPTIONS = (*_WINDOW_OPTIONS, "text_column", "on_bad_input")
_SMALL_WORLD_OPTIONS = ("num_questions", "temperature")
_SUITE_OPTIONS = ("fast", "seed", "plot")
_SUITE = "Evaluate grammar, tasks in context, calibration, and loss by position; without a download."
_ADAPT = "Also predict TEXT while learning it: each window is learned after it was predicted."
_STRIDE = "Tokens by which the window moves.  [default: half of --context-length]"


@click.command(cls=SectionedCommand, epilog=SOURCES_HELP)
@click.argument("model", type=MODEL)
@offline_option
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@option(
    "Text", "--context-length", click.IntRange(1), "Tokens per window.  [default: the model's context, at most 2048]"
)
@option("Text", "--stride", click.IntRange(1), _STRIDE)
@option("Text", "--adapt", bool, _ADAPT)
@option("Text", "--adapt-learning-rate", click.FloatRange(0), "Of --adapt, for Adam.  [default: 1e-4]", advanced=True)
@data_option("text_column", "Text", default="text")
@data_option("on_bad_input", "Text")
@option("Multiple choice", "--multiple-choice", PATH, "Questions as JSON lines.", metavar="FILE")
@option("Multiple choice", "--out", PATH, "New file for the answers, one JSON line per question.")
@option("Small world", "--small-world", bool, "Ask held-out questions about the built-in corpus; see mlxlm prepare.")
@option(
    "Small world", "--num-questions", click.IntRange(1, 1000), "Questions of each kind.  [default: 20]", advanced=True
)
@option(
    "Small world", "--temperature", click.FloatRange(0), "Sampling temperature.  [default: 0, greedy]", advanced=True
)
@option("Suite", "--suite", bool, _SUITE)
@option("Suite", "--fast", bool, "A quarter of the items of the suite.")
@option("Suite", "--seed", click.IntRange(0), "Chooses the items.  [default: 0]", advanced=True)
@option("Suite", "--plot", PATH, "New file for a picture of the results: .png, .svg or .pdf.", metavar="FILE")
@adapter_option()
@json_option
def evaluate(
    model: str,
    texts: tuple[str, ...],
    multiple_choice: Path | None,
    adapter: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Evaluate MODEL on TEXT, on multiple-choice questions, on the built-in corpus, or on the built-in suite.

    TEXT gives loss, perplexity, bits per byte and bits per character; --multiple-choice gives the accuracy;
    --small-world counts the right answers to each kind of question.

    --suite compares pairs of sentences of which one is grammatical, and measures tasks such as copying and addition,
    and the calibration and the loss by position on TEXT or a built-in text. If MODEL is a training run, it evaluates
    each checkpoint that was kept, and the run's report shows the curves.

    A line of --multiple-choice is {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}; the answer's index
    starts at 0.
    \f

    Every token is predicted once, from a sliding window with at least context-length - stride tokens before it. A
    smaller stride is slower, and usually gives a lower loss. `compare` and `quantize` use the default windows.

    --adapt also predicts TEXT with weights that learn each window after it was predicted (test-time training).
    """  # noqa: D301 - --help ends at \f
    small_world, suite = options.pop("small_world"), options.pop("suite")
    text_alone = texts and not suite
    kinds = {
        "TEXT": text_alone,
        "--multiple-choice": multiple_choice,
        "--small-world": small_world,
        "--suite": suite,
    }
    given = [name for name, value in kinds.items() if value]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} can't be combined (try: one command for each)")
    if not given:
        hint = "TEXT files, - for standard input, --multiple-choice FILE, --small-world or --suite"
        raise click.UsageError(f"there is nothing to evaluate (try: {hint})")
    reject_unused_options(
        options,
        (not texts, _TEXT_OPTIONS, "there is no TEXT"),
        (suite, _WINDOW_OPTIONS, "--suite has windows of its own"),
        (not suite, _SUITE_OPTIONS, "--suite is not given"),
        (not options["adapt"], ["adapt_learning_rate"], "--adapt is not given"),
        (not multiple_choice, ["out"], "--multiple-choice is not given"),
        (not small_world, _SMALL_WORLD_OPTIONS, "--small-world is not given"),
    )
    if small_world:
        limits = given_values({name: options[name] for name in _SMALL_WORLD_OPTIONS})
        scores = small_world_scores(generation.load(model, adapter), "Asking", **limits)
        if as_json:
            render.emit_json({"model": model, "scores": [asdict(score) for score in scores]})
        else:
            render.print_small_world(scores)
    elif suite:
        _evaluate_suite(model, adapter, texts, options, as_json)
    elif multiple_choice:
        _evaluate_multiple_choice(model, adapter, multiple_choice, options["out"], as_json)
    else:
        _evaluate_texts(model, adapter, texts, options, as_json)


def _evaluate_texts(
    model: str, adapter: Path | None, texts: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> None:
    from mlxlm.evaluate.adaptation import ADAPT_LEARNING_RATE
    from mlxlm.evaluate.loss import TextLoss, evaluate_text, window_lengths

    total = total_bytes(texts)
    lm = generation.load(model, adapter)
    given = options["context_length"], options["stride"]
    windows = window_lengths(lm.config.max_position_embeddings, *given)
    lengths = dict(zip(("context_length", "stride"), windows, strict=True))
    rates: dict[str, float | None] = {"": None}
    if options["adapt"]:
        if (stream := unseekable_source(texts)) is not None:
            raise DataError(f"{stream} can be read only once, and --adapt reads it twice", "a file")
        given_rate = options["adapt_learning_rate"]
        rates[", adapted"] = ADAPT_LEARNING_RATE if given_rate is None else given_rate
    losses: dict[str, dict[str, TextLoss]] = {kind: {} for kind in rates}
    bad = BadInput(options["on_bad_input"] or "stop")
    start = time.perf_counter()
    with render.bytes_progress("Evaluating", total and total * len(rates)) as advance:
        for text, (kind, rate) in itertools.product(dict.fromkeys(texts), rates.items()):
            how = {"text_column": options["text_column"], "on_bad": BadInput("skip") if kind else bad}
            source = read_documents([text], stdin=sys.stdin.buffer, advance=advance, **how)
            loss = evaluate_text(lm, source, **lengths, adapt_learning_rate=rate)
            losses[kind]["stdin" if text == "-" else text] = loss
    print_skipped(bad.reasons.values())
    totals = {kind: sum(parts.values(), TextLoss()) for kind, parts in losses.items()}
    if as_json:
        parts = {"texts": {name: loss.to_dict() for name, loss in losses[""].items()}} if len(losses[""]) > 1 else {}
        adapted = {"adapted": totals[", adapted"].to_dict()} if options["adapt"] else {}
        results = {**totals[""].to_dict(), **lengths, "skipped": bad.skipped, **parts, **adapted}
        render.emit_json({"model": model, **results})
        return
    header = ("text", "tokens", "loss", "perplexity", "bits per byte", "bits per character")
    table: list[tuple[Any, ...]] = []
    for kind, rows in losses.items():
        for name, x in {**rows, "all": totals[kind]}.items() if len(rows) > 1 else rows.items():
            bits = f"{x.bits_per_byte:.4f}", f"{x.bits_per_character:.4f}"
            table.append((name + kind, x.tokens, f"{x.loss:.4f}", f"{x.perplexity:.4g}", *bits))
    render.print_table(table, header)
    render.result(render.windows(**lengths))
    tokens, seconds = sum(total.tokens for total in totals.values()), time.perf_counter() - start
    render.say(f"{tokens} tokens in {human_seconds(seconds)}, {tokens / seconds:.0f} tokens/s")


def _evaluate_suite(
    model: str, adapter: Path | None, texts: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> None:
    from mlxlm.evaluate.suite.plot import FORMATS, suite_figure
    from mlxlm.evaluate.suite.suite import FAST, FULL, evaluate_checkpoints, evaluate_suite

    plot, size, seed = options["plot"], FAST if options["fast"] else FULL, options["seed"] or 0
    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise click.UsageError(f"--plot {plot} has no format (try: a name that ends with {', '.join(FORMATS)})")
    bad = BadInput(options["on_bad_input"] or "stop")

    def documents() -> Iterator[Document] | None:
        column = options["text_column"]
        return read_documents(texts, stdin=sys.stdin.buffer, text_column=column, on_bad=bad) if texts else None

    is_run = adapter is None and is_run_folder(Path(model))
    if is_run and (stream := unseekable_source(texts)) is not None:
        raise DataError(f"{stream} can be read only once, and each checkpoint of a run reads it", "a file")
    with nullcontext() if plot is None else atomic_new_file(plot, DataError) as file:
        with render.phases_progress() as progress:
            how: dict[str, Any] = {"seed": seed, "progress": progress}
            if is_run:
                results = evaluate_checkpoints(Path(model), size, documents=documents, texts=texts, **how)
            else:
                results = {0: evaluate_suite(generation.load(model, adapter), size, documents=documents(), **how)}
        # Of a run, its best checkpoint: the one that every other command uses
        best = checkpoint_step(locate(model).weights) if is_run else 0
        if file is not None:
            suite_figure(results[best]).savefig(file, format=plot.suffix[1:].lower(), dpi=120)
    print_skipped(bad.reasons.values())
    if as_json:
        steps = {"step": best, "checkpoints": {step: asdict(x) for step, x in results.items()}} if is_run else {}
        render.emit_json({"model": model, "seed": seed, **asdict(size), **asdict(results[best]), **steps})
    else:
        if is_run:
            render.result(f"best checkpoint: step {best}")
        _print_suite(results[best])
        if len(results) > 1:
            render.result("")
            _print_checkpoints(results)
    if is_run:
        from mlxlm.train import Run

        run = Run.open(model)
        run.write_plots()
        render.say(f"the curves are in {run.path / REPORT_FILE}")


def _print_suite(result: SuiteResult) -> None:
    """Print the scores as tables on stdout, with 95 % confidence intervals in brackets."""
    grammar = [score for score in result.scores if score.group == "grammar"]
    rows = [(s.condition or s.name, _share(s.estimate)) for s in grammar]
    render.print_table(rows, ("minimal pairs", f"accuracy (chance 50%), {grammar[0].count} each"))
    tasks = [score for score in result.scores if score.group == "tasks"]
    choices = [score for score in tasks if score.exact_match is not None]
    if choices:
        render.result("")
        render.print_table(
            [
                (s.name, s.condition, _share(s.estimate), f"{s.chance:.0%}", _share(s.exact_match))
                for s in choices
                if s.exact_match is not None
            ],
            ("task", "", "accuracy", "chance", "exact match"),
        )
    repeated: dict[str, list[Score]] = {}
    for score in tasks:
        if score.exact_match is None:
            repeated.setdefault(score.condition, []).append(score)
    if repeated:
        render.result("")
        render.print_table(
            [
                ("induction", condition, _number(new.estimate), _number(again.estimate), _share(reduction.estimate))
                for condition, (new, again, reduction) in repeated.items()
            ],
            ("task", "", "bits per byte, new", "repeated", "loss reduction"),
        )
    text = [score for score in result.scores if score.group == "text"]
    render.result("")
    values = [(s.metric, _share(s.estimate)) for s in text if s.metric != "loss"]
    render.print_table(values, ("next-token predictions", ""))
    render.result("")
    losses = [(s.condition.removesuffix(" before"), _number(s.estimate)) for s in text if s.metric == "loss"]
    render.print_table(losses, ("tokens before", "loss (nats per token)"))
    if result.left_out:
        render.say(f"too long for the model's context: {'; '.join(result.left_out)}", style="yellow")


def _print_checkpoints(results: Mapping[int, SuiteResult]) -> None:
    """Print the scores over all conditions of each checkpoint."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for step, result in results.items():
        for score in result.scores:
            if score.condition == "all":
                cells = rows.setdefault((score.name, score.metric), {})
                cells[step] = f"{score.estimate.value:.3f}"
    table = [(*names, *(cells.get(step, "") for step in results)) for names, cells in rows.items()]
    render.print_table(table, ("", "", *(f"step {step}" for step in results)))


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _evaluate_multiple_choice(model: str, adapter: Path | None, path: Path, out: Path | None, as_json: bool) -> None:
    from mlxlm.evaluate.multiple_choice import Accuracy, evaluate_multiple_choice, read_questions

    with os_errors_as(DataError, "read", path):
        size = path.stat().st_size
    lm = generation.load(model, adapter)
    answers = []
    with nullcontext() if out is None else atomic_new_file(out, DataError) as file:
        with render.bytes_progress("Answering", size) as advance:
            for answered in evaluate_multiple_choice(lm, read_questions(path, advance)):
                answers.append(answered)
                if file is not None:
                    file.write(json_line(asdict(answered)))
        accuracy = Accuracy.of(answers)
    if as_json:
        render.emit_json({"model": model, **asdict(accuracy), "results": [asdict(a) for a in answers]})
        return
    shares = {"accuracy": accuracy.accuracy, "accuracy by bytes": accuracy.accuracy_by_bytes}
    rows = [(name, f"{share:.1%}", f"± {accuracy.stderr(share):.1%}") for name, share in shares.items()]
    rows.append(("chance", f"{accuracy.random_accuracy:.1%}", ""))
    render.print_table(rows, (f"{accuracy.questions} questions", "", ""))


def small_world_scores(lm: generation.LoadedModel, label: str, *args: Any, **options: Any) -> list[KindScore]:
    """Ask held-out questions about small-world. The arguments are those of `evaluate_small_world`."""
    from mlxlm.evaluate.small_world import evaluate_small_world

    with render.phases_progress() as progress:
        return evaluate_small_world(lm, *args, progress=lambda done, total: progress(label, done, total), **options)
