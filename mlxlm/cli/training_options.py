"""The options of the commands that train: settings of a run, and how DATA becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import (
    add_options,
    given_values,
    on_bad_input_option,
    option,
    reject_unused_options,
    text_column_option,
)
from mlxlm.config.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from mlxlm.train import TokenizerOptions

DEFAULT_MAX_SEQ_LENGTH = 512  # tokens at most, by default: longer costs more than a small model learns from it

_BATCHES, _OPTIMIZER, _EVALUATION = "Batches and memory", "Optimizer", "Validation and samples"
_CHECKPOINTS, _DATA = "Checkpoints", "Data"
_CHOICES = {
    "packing": click.Choice(["concatenate", "best-fit"]),
    "optimizer": click.Choice(list(OPTIMIZERS)),
    "schedule": click.Choice(["cosine", "linear", "wsd", "constant"]),
    "dtype": click.Choice(["float32", "bfloat16"]),
}

# Options that are fields of TrainSettings, which has the defaults: section, option, type, help.
SETTINGS = (
    (_BATCHES, "--batch-size", int, "Sequences per forward pass.  [default: 16, or fitted to the time limit]"),
    (
        _BATCHES,
        "--max-seq-length",
        int,
        "Tokens per sequence, and context of the model.  [default: the context of the preset or config, at most 512; "
        "or fitted to the time limit]",
    ),
    (_BATCHES, "--grad-accumulation-steps", int, "Forward passes per optimizer step.  [default: 1]"),
    (
        _BATCHES,
        "--packing",
        _CHOICES["packing"],
        "concatenate fills rows without padding; best-fit packs whole documents and pads.  [default: concatenate]",
    ),
    (_BATCHES, "--document-mask", bool, "Let tokens attend only to their own document."),
    (
        _BATCHES,
        "--dtype",
        _CHOICES["dtype"],
        "Dtype of matrix products; weights are always float32.  [default: bfloat16; float32 on a CPU]",
    ),
    (_BATCHES, "--grad-checkpoint", bool, "Recompute activations in the backward pass: less memory, more time."),
    (
        _OPTIMIZER,
        "--optimizer",
        _CHOICES["optimizer"],
        "Optimizer. muon updates matrices with Muon and everything else with AdamW.  [default: adamw]",
    ),
    (_OPTIMIZER, "--learning-rate", float, "Peak learning rate.  [default: by model size and optimizer]"),
    (_OPTIMIZER, "--lr-schedule", _CHOICES["schedule"], "Learning-rate schedule after warmup.  [default: cosine]"),
    (_OPTIMIZER, "--warmup-steps", int, "Steps of linear warmup.  [default: 5% of the steps, at most 500]"),
    (_OPTIMIZER, "--min-lr-ratio", float, "Final learning rate, as a fraction of the peak.  [default: 0.1]"),
    (
        _OPTIMIZER,
        "--decay-fraction",
        float,
        "With --lr-schedule wsd: fraction of the steps that decay.  [default: 0.2]",
    ),
    (
        _OPTIMIZER,
        "--weight-decay",
        float,
        "Decoupled weight decay of matrices.  [default: by optimizer; 10 times that for more than 16 epochs]",
    ),
    (
        _OPTIMIZER,
        "--beta1",
        float,
        "Decay rate of the average gradient; with muon, AdamW's.  [default: by optimizer]",
    ),
    (
        _OPTIMIZER,
        "--beta2",
        float,
        "Decay rate of the average squared gradient; with lion, of the momentum.  [default: by optimizer]",
    ),
    (_OPTIMIZER, "--grad-clip", float, "Clip the gradient to this global norm; 0 disables it.  [default: 1.0]"),
    (_OPTIMIZER, "--dropout", float, "Dropout rate of embeddings and sublayer outputs.  [default: 0.0]"),
    (
        _OPTIMIZER,
        "--ema-decay",
        float,
        "Evaluate and save an exponential moving average of the weights with this decay; 0 disables it.  "
        "[default: 0.0]",
    ),
    (_OPTIMIZER, "--seed", int, "Random seed of weights, data order and dropout.  [default: 0]"),
    (
        _EVALUATION,
        "--eval-every",
        int,
        "Steps between validations; 0 validates at the end only.  [default: 250, or fitted to the time limit]",
    ),
    (_EVALUATION, "--eval-tokens", int, "Maximum number of tokens per validation.  [default: 131072]"),
    (_EVALUATION, "--sample-every", int, "Steps between text samples; 0 disables them.  [default: 0]"),
    (_EVALUATION, "--sample-prompt", str, "Prompt of the samples.  [default: none]"),
    (_EVALUATION, "--sample-tokens", int, "Tokens per sample.  [default: 64]"),
    (
        _CHECKPOINTS,
        "--save-every",
        int,
        "Steps between checkpoints; 0 saves by time only.  [default: 500, or 0 with a time limit]",
    ),
    (
        _CHECKPOINTS,
        "--save-minutes",
        float,
        "Save at the latest this many minutes after the last checkpoint; 0 saves by steps only.  [default: 10]",
    ),
    (
        _CHECKPOINTS,
        "--save-total-limit",
        int,
        "Number of recent checkpoints to keep; the best one is always kept.  [default: 2]",
    ),
    (
        _CHECKPOINTS,
        "--spike-threshold",
        float,
        "Stop if the loss rises by this many nats; 0 never stops.  [default: 1.0]",
    ),
)


def _name(setting_flag: str) -> str:
    return setting_flag.removeprefix("--").replace("-", "_")


FLAGS = {_name(setting_flag): setting_flag for _, setting_flag, _, _ in SETTINGS}  # by the setting's name


def setting_options(without: Collection[str] = (), help_texts: Mapping[str, str] | None = None) -> Callable:
    """Return a decorator that adds the options of SETTINGS to a command.

    Args:
        without: Names of settings to leave out.
        help_texts: Help texts by name that replace those of SETTINGS.
    """
    help_texts = help_texts or {}
    options = []
    for section, setting_flag, kind, text in SETTINGS:
        if (name := _name(setting_flag)) not in without:
            form = {"is_flag": True} if kind is bool else {"type": kind}
            options.append(option(section, setting_flag, default=None, help=help_texts.get(name, text), **form))
    return add_options(*options)


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TrainSettings that the command line sets, `steps` among them."""
    return given_values({name: options.get(name) for name in ("steps", *FLAGS)})


def reject_unused_settings(options: Mapping[str, Any], *rules: tuple[object, Collection[str], str]) -> None:
    """`reject_unused_options` with these rules, and those of the settings of a run."""
    reject_unused_options(
        options,
        *rules,
        (not options.get("sample_every"), ["sample_prompt", "sample_tokens"], "--sample-every is not given"),
        (options["lr_schedule"] != "wsd", ["decay_fraction"], "--lr-schedule wsd is not given"),
        (options["lr_schedule"] == "constant", ["min_lr_ratio"], "--lr-schedule constant stays at the peak"),
    )


def data_options(vocab_size: str = "the preset's, or less if the text supports less") -> Callable:
    """Return a decorator that adds the options of how DATA becomes tokens.

    Args:
        vocab_size: The default of `--vocab-size`, for its help text.
    """
    return add_options(
        option(
            _DATA,
            "--tokenizer",
            type=click.Path(path_type=Path),
            help="Tokenizer folder or file.  [default: train one on DATA]",
        ),
        option(
            _DATA, "--vocab-size", type=int, help=f"Vocabulary size of the tokenizer to train.  [default: {vocab_size}]"
        ),
        option(
            _DATA,
            "--tokenizer-type",
            type=click.Choice(["byte-level", "sentencepiece"]),
            help="Tokenizer type.  [default: byte-level]",
        ),
        text_column_option(_DATA),
        *validation_options("Text"),
        on_bad_input_option(_DATA),
    )


def data_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DataOptions that the command line sets."""
    names = ("validation", "validation_fraction", "text_column", "on_bad_input")
    return given_values({name: options.get(name) for name in names})


def given_tokenizer(options: Mapping[str, Any]) -> TokenizerOptions:
    """The TokenizerOptions that the command line sets."""
    from mlxlm.train import TokenizerOptions

    return TokenizerOptions(
        options["tokenizer"], options["tokenizer_type"] or TokenizerOptions.tokenizer_type, options["vocab_size"]
    )


def validation_options(what: str) -> tuple[Callable, ...]:
    """`--validation` and `--validation-fraction`; `what` the validation data is."""
    return (
        option(
            _DATA,
            "--validation",
            multiple=True,
            metavar="FILE",
            help=f"{what} for validation, instead of a part of DATA. Repeatable.",
        ),
        option(
            _DATA,
            "--validation-fraction",
            type=float,
            help="Fraction of DATA that is held out for validation.  [default: 0.05]",
        ),
    )


def unused_data_rules(options: Mapping[str, Any], data: Iterable[str]) -> list[tuple[Any, Collection[str], str]]:
    """The rules of `reject_unused_options` for `data_options` with this DATA."""
    from mlxlm.data.manifest import is_prepared

    prepared = any(map(is_prepared, data))
    tokenizer = "the tokenizer that the data was prepared with" if prepared else "--tokenizer"
    return [
        (prepared or options["tokenizer"], ["vocab_size", "tokenizer_type"], f"{tokenizer} has its own"),
        (options["validation"], ["validation_fraction"], "--validation says what is held out"),
        (prepared, ["validation", "validation_fraction"], "prepared data has its own validation part"),
        (prepared, ["text_column", "on_bad_input"], "prepared data is already tokenized"),
    ]


def print_skipped(count: int) -> None:
    """Report how many bad lines of the input were skipped, if any."""
    if count:
        lines = "line or row" if count == 1 else "lines or rows"
        render.say(f"skipped {count:,} bad {lines} of the input", style="yellow")
