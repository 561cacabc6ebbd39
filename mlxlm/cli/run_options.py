"""The options of commands that train, and what they have in common: settings, --resume, and no idle options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.config.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from mlxlm.train import Run

DEFAULT_MAX_SEQ_LENGTH = (
    512  # tokens of a sequence, unless asked for: longer ones cost more than a small model learns from them
)

# Options that are fields of TrainSettings, left to its defaults where not given.
SETTINGS = (
    ("--batch-size", int, "Sequences per forward pass (default: 16, or by the time)."),
    ("--max-seq-length", int, "Tokens per sequence, and of chats (default: by the time, or the context up to 512)."),
    ("--grad-accumulation-steps", int, "Forward passes per step, their gradients added."),
    ("--packing", click.Choice(["concatenate", "best-fit"]), "Rows cut from the text, or of whole documents, padded."),
    ("--document-mask", bool, "Tokens see their own document only."),
    ("--optimizer", click.Choice(list(OPTIMIZERS)), "Muon moves matrices, AdamW the rest."),
    ("--learning-rate", float, "Peak learning rate (default: by model size and optimizer)."),
    ("--lr-schedule", click.Choice(["cosine", "linear", "wsd", "constant"]), "Learning rate after the warmup."),
    ("--warmup-steps", int, "Steps to the peak learning rate (default: 5%, at most 500)."),
    ("--min-lr-ratio", float, "At the end, as a fraction of the peak."),
    ("--decay-fraction", float, "wsd: the share of steps that decay."),
    ("--weight-decay", float, "Decoupled, on matrices only (default: by optimizer; over 16 passes: 10 times that)."),
    ("--beta1", float, "The average of gradients (default: by optimizer); muon: AdamW's."),
    ("--beta2", float, "The average of squared gradients, or lion's momentum (default: by optimizer)."),
    ("--grad-clip", float, "Largest global norm of the gradient; 0: none."),
    ("--dropout", float, "Dropout of embeddings and of each sublayer's output."),
    ("--ema-decay", float, "Decay of averaged weights, which are evaluated and saved as the model; 0: none."),
    ("--dtype", click.Choice(["float32", "bfloat16"]), "Of products (default: bfloat16; float32 on a CPU)."),
    ("--grad-checkpoint", bool, "Make activations twice instead of keeping them: less memory, more time."),
    ("--seed", int, "Weights, order of the data, dropout."),
    ("--eval-every", int, "Steps between validations (default: 250, or by the time); 0: at the end only."),
    ("--eval-tokens", int, "Most tokens per validation."),
    ("--save-every", int, "Steps between checkpoints (default: 500; 0 where the time is given); 0: not by steps."),
    ("--save-minutes", float, "Minutes after a checkpoint until the next one is due (default: 10); 0: not by time."),
    ("--save-total-limit", int, "How many of the last checkpoints stay (the best always does)."),
    ("--sample-every", int, "Steps between sample texts; 0: none."),
    ("--sample-prompt", str, "What samples begin with."),
    ("--sample-tokens", int, "Length of a sample."),
    ("--spike-threshold", float, "Stop when the loss has risen by this many nats; 0: never."),
)
FLAGS = {flag.removeprefix("--").replace("-", "_"): flag for flag, _, _ in SETTINGS}  # by the setting's name


def setting_options(without: Collection[str] = (), help_texts: Mapping[str, str] | None = None) -> Callable:
    """Adds the options of SETTINGS to a command: those of names in `without` not, and those in `help_texts` with this help
    instead of their own."""
    help_texts = help_texts or {}

    def added(command):
        for flag, kind, text in reversed(SETTINGS):
            name = flag.removeprefix("--").replace("-", "_")
            if name not in without:
                form = {"is_flag": True} if kind is bool else {"type": kind}
                command = click.option(flag, default=None, help=help_texts.get(name, text), **form)(command)
        return command

    return added


ON_BAD_INPUT = click.option(
    "--on-bad-input",
    type=click.Choice(["stop", "skip"]),
    help="At a line that isn't UTF-8 text or valid JSON: stop, or skip and count it.  [default: stop]",
)


def data_options(vocab_size: str = "the preset's") -> Callable:
    """Adds what says how DATA becomes tokens; `vocab_size` is that option's default, in words."""
    options = (
        click.option("--tokenizer", type=click.Path(path_type=Path), help="A trained tokenizer (default: train one)."),
        click.option("--vocab-size", type=int, help=f"Of the tokenizer to train (default: {vocab_size}, or less)."),
        click.option(
            "--tokenizer-type", type=click.Choice(["byte-level", "sentencepiece"]), help="Of it.  [default: byte-level]"
        ),
        click.option("--text-column", metavar="NAME", help="Of tables and JSON lines.  [default: text, or messages]"),
        click.option(
            "--validation", multiple=True, help="Text for validation (default: a part of DATA). Can be repeated."
        ),
        click.option("--validation-fraction", type=float, help="Share of DATA held out.  [default: 0.05]"),
        ON_BAD_INPUT,
    )

    def added(command):
        for option in reversed(options):
            command = option(command)
        return command

    return added


def unused_data_rules(options: Mapping[str, Any], data: Iterable[str]) -> list[tuple[Any, Collection[str], str]]:
    """The rules of `reject_unused_options` for those of `data_options` beside this DATA."""
    from mlxlm.data.manifest import is_prepared

    prepared = any(map(is_prepared, data))
    own = "the tokenizer that the data was prepared with" if prepared else "--tokenizer"
    return [
        (prepared or options["tokenizer"], ["vocab_size", "tokenizer_type"], f"{own} has its own"),
        (options["validation"], ["validation_fraction"], "--validation says what is held out"),
        (prepared, ["validation", "validation_fraction"], "prepared data has its own validation part"),
        (prepared, ["text_column", "on_bad_input"], "prepared data is read already"),
    ]


def print_skipped(count: int) -> None:
    """Say how much bad input was skipped; nothing if there was none."""
    if count:
        lines = "line or row" if count == 1 else "lines or rows"
        render.say(f"skipped {count:,} bad {lines} of the input", style="yellow")


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TrainSettings that were given, `steps` among them."""
    return {name: options[name] for name in ("steps", *FLAGS) if options.get(name) is not None}


def given_options(names: Iterable[str]) -> list[str]:
    """Those of the options that the command line has, as they are written there."""
    context = click.get_current_context()
    there = {n for n in names if context.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE}
    return [p.opts[0] for p in context.command.params if p.name in there and isinstance(p, click.Option)]


def check_resume_alone(*arguments: Any, options: Iterable[str]) -> None:
    """Raise a UsageError if any of the `arguments`, or one of these options, was given beside --resume."""
    if any(arguments) or given_options(options):
        raise click.UsageError("--resume takes the run's own data and settings: give nothing else")


moved_data_option = click.option(
    "--data", "moved_data", type=click.Path(path_type=Path), metavar="FOLDER",
    help="With --resume: where the run's prepared data was moved to.",
)  # fmt: skip


def check_data_needs_resume(moved_data: Path | None) -> None:
    """Raise a UsageError for --data where there is nothing to resume."""
    if moved_data is not None:
        raise click.UsageError("--data says where the data of a run was moved to: give --resume RUN, too")


def open_resumed_run(path: Path, moved_data: Path | None) -> Run:
    """The run of --resume, with its data where --data says."""
    from mlxlm.train import Run

    run = Run.open(path)
    return run if moved_data is None else run.with_data(moved_data)


def reject_unused_options(options: Mapping[str, Any], *rules: tuple[Any, Collection[str], str]) -> None:
    """Raise a UsageError for an option that would have no effect beside the others.

    rules: where the first is true, the options of these names have none, for this reason; those of settings are known.
    """
    for idle, names, reason in (
        *rules,
        (not options.get("sample_every"), ["sample_prompt", "sample_tokens"], "--sample-every is not given"),
        (options["lr_schedule"] != "wsd", ["decay_fraction"], "--lr-schedule wsd is not given"),
        (options["lr_schedule"] == "constant", ["min_lr_ratio"], "--lr-schedule constant stays at the peak"),
    ):
        given = [f"--{name.replace('_', '-')}" for name in names if options.get(name) not in (None, ())]
        if idle and given:
            raise click.UsageError(f"{' and '.join(given)} would have no effect: {reason}")
