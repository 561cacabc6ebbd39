"""The options of the commands that train: settings of a run, and how DATA becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from mlxlm.cli import render
from mlxlm.cli.options import PATH, add_options, field_option, given_values, option, reject_unused_options
from mlxlm.config import ModelConfig
from mlxlm.config.option import declaration, options_of
from mlxlm.config.quantization import BITS, Format
from mlxlm.data.manifest import Manifest, SkipReason, is_prepared
from mlxlm.data.options import DataOptions
from mlxlm.families import load_config, load_preset
from mlxlm.train.settings import TokenizerOptions, TrainSettings

DISTILLATION = ("teacher", "kd_ratio", "kd_temperature", "teacher_top_k")
_MAX_SEQ_LENGTH = 512  # tokens at most, by default: longer costs more than a small model learns from it
_SHOWN_REASONS = 5  # kinds of bad input, the most frequent
# The options of a run that the command line has, by name; `steps` is among the options of each command's length.
SETTINGS = {name: field for name, field in options_of(TrainSettings).items() if declaration(field).section}
FLAGS = {name: "--" + name.replace("_", "-") for name in SETTINGS if name != "steps"}
steps_option = field_option(SETTINGS["steps"])
_CHAT_TEMPLATE = "Chat template, if the model has none; see mlxlm chat."
chat_template_option = option("Data", "--chat-template", str, _CHAT_TEMPLATE, metavar="NAME|FILE", advanced=True)


def setting_options(without: Collection[str] = (), help_texts: Mapping[str, str] | None = None) -> Callable[..., Any]:
    """Return a decorator that adds the options of a run to a command, by section.

    Args:
        without: Names of settings to leave out.
        help_texts: Help texts by name that replace those of the settings; defaults after two spaces, in brackets.
    """
    sections = list(dict.fromkeys(declaration(field).section for field in SETTINGS.values()))
    names = (name for name in FLAGS if name not in without)
    added = sorted(names, key=lambda name: sections.index(declaration(SETTINGS[name]).section))
    return add_options(*(field_option(SETTINGS[name], (help_texts or {}).get(name)) for name in added))


quantize_bits_option = option(
    "Distillation",
    "--quantize-bits",
    click.Choice([str(bits) for bits in BITS]),
    "Train with the weights rounded as mlxlm quantize --method rtn does with these --bits, for a better result.",
    advanced=True,
)


def default_max_seq_length(config: ModelConfig) -> int:
    """The length of rows, if the command line doesn't set it."""
    return min(_MAX_SEQ_LENGTH, config.max_position_embeddings)


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of TrainSettings that the command line sets, `steps` among them."""
    bits = options.get("quantize_bits")
    quantization = None if bits is None else Format(int(bits)).to_dict()
    return given_values({**{name: options.get(name) for name in SETTINGS}, "quantization": quantization})


def reject_unused_settings(
    options: Mapping[str, Any], data: Iterable[str | Path], *rules: tuple[object, Collection[str], str]
) -> None:
    """`reject_unused_options` with these rules, and those of the settings of a run and of DATA."""
    prepared = any(map(is_prepared, data))
    tokenizer = "the tokenizer that the data was prepared with" if prepared else "--tokenizer"
    reject_unused_options(
        options,
        *rules,
        (prepared or options.get("path"), ["vocab_size", "tokenizer_type"], f"{tokenizer} has its own"),
        (prepared, ["validation", "validation_fraction"], "prepared data has its own validation part"),
        (prepared, ["text_column", "on_bad_input"], "prepared data is already tokenized"),
        (options.get("preset") and options.get("config"), ["preset"], "--config chooses the model"),
        (options.get("validation"), ["validation_fraction"], "--validation says what is held out"),
        (not options.get("teacher"), DISTILLATION, "--teacher is not given"),
        (not options.get("sample_every"), ["sample_prompt", "sample_tokens"], "--sample-every is not given"),
        (options["lr_schedule"] != "wsd", ["decay_fraction"], "--lr-schedule wsd is not given"),
        (options["lr_schedule"] == "constant", ["min_lr_ratio"], "--lr-schedule constant stays at the peak"),
    )


def data_options(vocab_size: str | None = None) -> Callable[..., Any]:
    """Return a decorator that adds the options of how DATA becomes tokens.

    Args:
        vocab_size: The default of `--vocab-size`, for its help text.
    """
    tokenizer, data = options_of(TokenizerOptions), options_of(DataOptions)
    return add_options(
        field_option(tokenizer["path"]),
        field_option(tokenizer["vocab_size"], default=vocab_size),
        field_option(tokenizer["tokenizer_type"]),
        field_option(data["text_column"]),
        validation_options(),
        field_option(data["on_bad_input"]),
    )


def validation_options(text: str | None = None) -> Callable[..., Any]:
    """Return a decorator that adds `--validation`, with another help text if one is given, and its fraction."""
    data = options_of(DataOptions)
    return add_options(field_option(data["validation"], text), field_option(data["validation_fraction"]))


def model_options(section: str, preset: str) -> Callable[..., Any]:
    """Return a decorator that adds `--preset` and `--config`; `preset` is the help text of the first."""
    return add_options(
        option(section, "--preset", str, preset),
        option(section, "--config", PATH, "Use this config.json instead of a preset.", advanced=True),
    )


def chosen_config(options: Mapping[str, Any]) -> ModelConfig:
    """The model of `--preset` or `--config`."""
    return load_config(options["config"]) if options["config"] else load_preset(options["preset"] or "1m")


def data_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DataOptions that the command line sets."""
    return given_values({name: options.get(name) for name in options_of(DataOptions)})


def given_tokenizer(options: Mapping[str, Any]) -> TokenizerOptions:
    """The TokenizerOptions that the command line sets."""
    return TokenizerOptions(**given_values({name: options[name] for name in options_of(TokenizerOptions)}))


def print_read(data: Manifest | Path) -> None:
    """Report the formats of the records that were read, and what was skipped: of a manifest, or the one in a folder."""
    manifest = data if isinstance(data, Manifest) else Manifest.read(data)
    formats = manifest.formats or []
    if any(format.name != "text" for format in formats):
        counts = (f"{f.name} ({f.documents:,} record{'s' * (f.documents != 1)})" for f in formats)
        render.say(f"record format: {', '.join(counts)}")
    print_skipped(manifest.skip_reasons or [])


def print_skipped(reasons: Iterable[SkipReason]) -> None:
    """Report how many bad lines of the input were skipped, if any, and why."""
    ordered = sorted(reasons, key=lambda reason: -reason.count)
    if count := sum(reason.count for reason in ordered):
        lines = "line or row" if count == 1 else "lines or rows"
        render.say(f"skipped {count:,} bad {lines} of the input:", style="yellow")
    for reason in ordered[:_SHOWN_REASONS]:
        render.say(f"  {reason.count:,} like this: {reason.example}", style="yellow")
