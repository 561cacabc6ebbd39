"""The options of the commands that train: settings of a run, and how DATA becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlm.cli import render
from mlxlm.cli.options import (
    PATH,
    add_options,
    given_values,
    on_bad_input_option,
    option,
    reject_unused_options,
    text_column_option,
)
from mlxlm.config.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig
    from mlxlm.train import TokenizerOptions

DEFAULT_MAX_SEQ_LENGTH = 512  # tokens at most, by default: longer costs more than a small model learns from it
_DATA = "Data"

# Options that are fields of TrainSettings, which has the defaults: option, type and help, by section.
SETTINGS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "Batches and memory": (
        ("--batch-size", int, "Sequences per forward pass.  [default: 16, or fitted to the time limit]"),
        ("--max-seq-length", int, "Tokens per sequence.  [default: the model's context up to 512; or by time limit]"),
        ("--grad-accumulation-steps", int, "Forward passes per optimizer step.  [default: 1]"),
        (
            "--packing",
            ["concatenate", "best-fit"],
            "Cut the joined documents into sequences, or fit whole documents in and pad.  [default: concatenate]",
        ),
        ("--document-mask", bool, "Let tokens attend only to their own document."),
        (
            "--dtype",
            ["float32", "bfloat16"],
            "Compute dtype; weights stay float32 (mixed precision).  [default: bfloat16; float32 on a CPU]",
        ),
        ("--grad-checkpoint", bool, "Recompute activations in the backward pass: less memory, more time."),
    ),
    "Optimizer": (
        (
            "--optimizer",
            list(OPTIMIZERS),
            "Optimizer; muon uses AdamW for embeddings, norms and the output head.  [default: adamw]",
        ),
        ("--learning-rate", float, "Peak learning rate.  [default: by model size and optimizer]"),
        (
            "--lr-schedule",
            ["cosine", "linear", "wsd", "constant"],
            "Learning rate schedule after the warmup; wsd stays constant, then decays linearly.  [default: cosine]",
        ),
        ("--warmup-steps", int, "Steps of linear warmup.  [default: 5% of the steps, at most 500]"),
        ("--min-lr-ratio", float, "Final learning rate, as a fraction of the peak.  [default: 0.1]"),
        ("--decay-fraction", float, "With --lr-schedule wsd: fraction of the steps that decay.  [default: 0.2]"),
        ("--weight-decay", float, "Decoupled weight decay of matrices.  [default: by optimizer and epochs]"),
        ("--beta1", float, "Decay rate of the average gradient; with muon, AdamW's.  [default: by optimizer]"),
        ("--beta2", float, "Decay rate of the average squared gradient, or lion's momentum.  [default: by optimizer]"),
        ("--grad-clip", float, "Clip the gradient to this global norm; 0 disables it.  [default: 1.0]"),
        ("--dropout", float, "Dropout rate of embeddings and sublayer outputs.  [default: 0.0]"),
        ("--ema-decay", float, "Evaluate and save a moving average of the weights with this decay.  [default: 0.0]"),
        ("--seed", int, "Random seed of weights, data order and dropout.  [default: 0]"),
    ),
    "Validation and samples": (
        ("--eval-every", int, "Steps between validations; 0: only at the end.  [default: 250, or by the time limit]"),
        ("--eval-tokens", int, "Maximum number of tokens per validation.  [default: 131072]"),
        ("--sample-every", int, "Steps between text samples; 0 disables them.  [default: 0]"),
        ("--sample-prompt", str, "Prompt of the samples.  [default: none]"),
        ("--sample-tokens", int, "Tokens per sample.  [default: 64]"),
    ),
    "Checkpoints": (
        ("--save-every", int, "Steps between checkpoints; 0: only by time.  [default: 500, or 0 with a time limit]"),
        ("--save-minutes", float, "Maximum minutes between checkpoints; 0: only by steps.  [default: 10]"),
        ("--save-total-limit", int, "Number of recent checkpoints to keep, in addition to the best one.  [default: 2]"),
        ("--spike-threshold", float, "Stop if the loss rises this far, in nats, beyond noise; 0: never.  [default: 1]"),
    ),
}


def _name(setting_flag: str) -> str:
    return setting_flag.removeprefix("--").replace("-", "_")


FLAGS = {_name(setting_flag): setting_flag for rows in SETTINGS.values() for setting_flag, _, _ in rows}  # by name


def setting_options(without: Collection[str] = (), help_texts: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Return a decorator that adds the options of SETTINGS to a command.

    Args:
        without: Names of settings to leave out.
        help_texts: Help texts by name that replace those of SETTINGS.
    """
    texts = help_texts or {}
    return add_options(
        *(
            option(section, setting_flag, kind, texts.get(_name(setting_flag), text), default=None)
            for section, rows in SETTINGS.items()
            for setting_flag, kind, text in rows
            if _name(setting_flag) not in without
        )
    )


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TrainSettings that the command line sets, `steps` among them."""
    return given_values({name: options.get(name) for name in ("steps", *FLAGS)})


def reject_unused_settings(options: Mapping[str, Any], *rules: tuple[object, Collection[str], str]) -> None:
    """`reject_unused_options` with these rules, and those of the settings of a run."""
    reject_unused_options(
        options,
        *rules,
        (options.get("preset") and options.get("config"), ["preset"], "--config chooses the model"),
        (options["validation"], ["validation_fraction"], "--validation says what is held out"),
        (not options.get("sample_every"), ["sample_prompt", "sample_tokens"], "--sample-every is not given"),
        (options["lr_schedule"] != "wsd", ["decay_fraction"], "--lr-schedule wsd is not given"),
        (options["lr_schedule"] == "constant", ["min_lr_ratio"], "--lr-schedule constant stays at the peak"),
    )


def data_options(vocab_size: str = "the preset's, or less if the text supports less") -> Callable[..., Any]:
    """Return a decorator that adds the options of how DATA becomes tokens.

    Args:
        vocab_size: The default of `--vocab-size`, for its help text.
    """
    types = ["byte-level", "sentencepiece"]
    return add_options(
        option(_DATA, "--tokenizer", PATH, "Path or model name of a tokenizer.  [default: train one on DATA]"),
        option(_DATA, "--vocab-size", int, f"Vocabulary size of the tokenizer to train.  [default: {vocab_size}]"),
        option(_DATA, "--tokenizer-type", types, "Tokenizer type.  [default: byte-level]"),
        text_column_option(_DATA),
        validation_options("Text"),
        on_bad_input_option(_DATA),
    )


def validation_options(what: str) -> Callable[..., Any]:
    """Return a decorator that adds `--validation` and `--validation-fraction`; `what` the validation data is."""
    text = f"{what} for validation, instead of a part of DATA. Repeatable."
    fraction = "Fraction of DATA that is held out for validation.  [default: 0.05]"
    return add_options(
        option(_DATA, "--validation", str, text, multiple=True, metavar="FILE"),
        option(_DATA, "--validation-fraction", float, fraction),
    )


def model_options(section: str, preset: str) -> Callable[..., Any]:
    """Return a decorator that adds `--preset` and `--config`; `preset` is the help text of the first."""
    return add_options(
        option(section, "--preset", str, preset),
        option(section, "--config", PATH, "Use this config.json instead of a preset."),
    )


def chosen_config(options: Mapping[str, Any]) -> ModelConfig:
    """The model of `--preset` or `--config`."""
    from mlxlm.families import load_config, load_preset

    return load_config(options["config"]) if options["config"] else load_preset(options["preset"] or "1m")


def data_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DataOptions that the command line sets."""
    names = ("validation", "validation_fraction", "text_column", "on_bad_input")
    return given_values({name: options.get(name) for name in names})


def given_tokenizer(options: Mapping[str, Any]) -> TokenizerOptions:
    """The TokenizerOptions that the command line sets."""
    from mlxlm.train import TokenizerOptions

    kind = options["tokenizer_type"] or TokenizerOptions.tokenizer_type
    return TokenizerOptions(options["tokenizer"], kind, options["vocab_size"])


def unused_data_rules(options: Mapping[str, Any], data: Iterable[str | Path]) -> list[tuple[Any, Collection[str], str]]:
    """The rules of `reject_unused_options` for `data_options` with this DATA."""
    from mlxlm.data.manifest import is_prepared

    prepared = any(map(is_prepared, data))
    tokenizer = "the tokenizer that the data was prepared with" if prepared else "--tokenizer"
    return [
        (prepared or options["tokenizer"], ["vocab_size", "tokenizer_type"], f"{tokenizer} has its own"),
        (prepared, ["validation", "validation_fraction"], "prepared data has its own validation part"),
        (prepared, ["text_column", "on_bad_input"], "prepared data is already tokenized"),
    ]


def print_skipped(count: int) -> None:
    """Report how many bad lines of the input were skipped, if any."""
    if count:
        lines = "line or row" if count == 1 else "lines or rows"
        render.say(f"skipped {count:,} bad {lines} of the input", style="yellow")
