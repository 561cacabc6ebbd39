"""Architecture comparison: variants of a model, trained on the same tokens with the same tokenizer."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from mlxlm.checkpoint.locations import is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.config.overrides import apply_overrides, infer_field, parse_overrides, parse_value
from mlxlm.data import DataOptions, TokenDataset
from mlxlm.experiments.sweep import Sweep, is_finished, prepare_shared_data
from mlxlm.families import config_from_hf, config_to_hf, resolve_model_type
from mlxlm.report import read_run
from mlxlm.report.plots import plot_runs
from mlxlm.train.budget import Budget, check_duration
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.start import (
    Phase,
    as_data_options,
    as_tokenizer_options,
    no_phase,
    set_default_dtype,
    steps_for,
    with_tokenizer,
)
from mlxlm.train.step_benchmark import probe
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder

BASE = "base"  # the variant that changes nothing
SETTINGS = {field.name: str(field.type) for field in fields(TrainSettings)}
_BUDGET_SETTINGS = ("batch_size", "max_seq_length", "grad_accumulation_steps", "steps", "time_limit")
_DATA_SETTINGS = ("eval_every", "eval_tokens", "packing", "document_mask", "mask_prompt")
# What all variants share, and why.
_SHARED = {
    **dict.fromkeys(_BUDGET_SETTINGS, "one budget for all variants"),
    **dict.fromkeys(_DATA_SETTINGS, "the same for all variants"),
    "vocab_size": "one tokenizer for all variants",
    "max_position_embeddings": "the sequence length, one for all variants",
}


@dataclass(frozen=True)
class Variant:
    """A variant of a model.

    Attributes:
        name: Its name.
        parts: Overrides of the model, see `mlxlm.config.overrides`.
        settings: Fields of `TrainSettings` of this variant, such as dropout and learning_rate.
    """

    name: str
    parts: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a variant.

        Args:
            text: "NAME: PART=VALUE, ...", such as "wide: hidden_size=256, dropout=0.1"; "PART=VALUE" alone; a value
                that only one part has ("alibi", "swiglu"); or "base".

        Raises:
            ConfigError: The text has another form, or sets what all variants share.
        """
        name, colon, assignments = (piece.strip() for piece in text.partition(":"))
        if "=" in name:  # without a name; "rope_scaling=yarn:4" has a colon too
            name, colon, assignments = text.strip(), "", text.strip()
        if not name or bool(colon) != bool(assignments) and colon:
            raise ConfigError(f"{text!r} is not a variant", '"alibi: positions=alibi"')
        if not assignments:
            parts = {} if name == BASE else infer_field(name)
            if parts is None:
                raise ConfigError(f"variant {name!r} changes nothing", f'"{name}: NAME=VALUE", or {BASE}')
            return cls(name, parts, {})
        with variant_errors(name):
            values = parse_overrides(_split_at_commas(assignments))
            for key in (key for key in values if key in _SHARED):
                raise ConfigError(f"{key} can't differ between variants", _SHARED[key])
            settings = {key: parse_value(key, value, SETTINGS[key]) for key, value in values.items() if key in SETTINGS}
        return cls(name, {key: value for key, value in values.items() if key not in settings}, settings)

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"[^\w.=-]+", "-", self.name).strip("-.") or "variant"

    def apply_to(self, config: ModelConfig) -> ModelConfig:
        """Return the variant's model. Raises ConfigError for overrides that are impossible."""
        with variant_errors(self.name):
            return resolve_model_type(apply_overrides(config, self.parts, _SHARED))


@contextmanager
def variant_errors(name: str) -> Iterator[None]:
    """Prefix a ConfigError with the name of the variant."""
    try:
        yield
    except ConfigError as error:
        raise error.prefixed(f"variant {name}") from None


def _split_at_commas(text: str) -> list[str]:
    """Split at commas, except inside JSON."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return pieces


PLOT_FILE = "comparison.png"
_MAX_NAME_BYTES = 100  # of a variant's folder; file systems allow 255, and file names are made from it


@dataclass(frozen=True)
class Result:
    """The state of a variant's run.

    Attributes:
        name: The variant.
        path: Folder of its run.
        model_type: Model type of its configuration.
        parameters: Number of parameters.
        learning_rate: Peak learning rate.
        step: Last step.
        steps: Steps of the whole run.
        tokens: Tokens trained on so far.
        seconds: Time of the steps so far.
        tokens_per_second: Over all steps but the first, which compiles.
        memory: MLX's peak memory in bytes; None if the run is unfinished.
        loss: Validation loss at the best validation, in nats per token; None before the first one.
        bits_per_byte: Bits per byte of the best validation.
        finished: Whether the last step is saved.
    """

    name: str
    path: str
    model_type: str
    parameters: int
    learning_rate: float
    step: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    memory: int | None
    loss: float | None
    bits_per_byte: float | None
    finished: bool


@dataclass(frozen=True)
class Comparison(Sweep):
    """A folder of runs, one for each variant of a model.

    To train what is unfinished: `for variant in comparison.variants: train(comparison.open_run(variant), ...)`.

    Attributes:
        config: The base model.
        variants: The variants.
    """

    config: ModelConfig
    variants: tuple[Variant, ...]

    KIND: ClassVar[str] = "comparison"
    FILE: ClassVar[str] = "comparison.json"
    COMMAND: ClassVar[str] = "mlxlm compare-architectures"

    @classmethod
    def parse_fields(cls, values: Mapping[str, Any], file: Path) -> dict[str, Any]:
        """Return the fields that a comparison adds. See `Sweep.parse_fields`."""
        variants = tuple(Variant(**variant) for variant in values["variants"])
        texts = [text for v in variants for text in (v.name, *v.parts, *v.parts.values())]
        settings = [values["settings"], *(variant.settings for variant in variants)]
        if not all(isinstance(text, str) for text in texts) or any(s.keys() - SETTINGS for s in settings):
            raise ValueError
        config = config_from_hf(values["config"], str(file))
        _check_names(variants)
        return {"config": config, "variants": variants}

    def open_run(self, variant: Variant, phase: Phase = no_phase) -> Run:
        """Open the variant's run, or make it."""
        return self.open_or_start_run(variant.folder, self.config_of(variant), variant.settings, phase)

    def config_of(self, variant: Variant) -> ModelConfig:
        """Return the variant's model."""
        return variant.apply_to(self.config)

    def plot(self) -> Path:
        """Plot the loss curves so far to a PNG file, and return its path."""
        plot_runs({v.name: read_run(self.path / v.folder) for v in self._started_variants()}, self.path / PLOT_FILE)
        return self.path / PLOT_FILE

    def results(self) -> list[Result]:
        """Return the state of each variant whose run has started."""
        return [_result(variant, Run.open(self.path / variant.folder)) for variant in self._started_variants()]

    def _started_variants(self) -> list[Variant]:
        return [variant for variant in self.variants if is_run_folder(self.path / variant.folder)]


def start_comparison(
    out: Path | str,
    data: DataOptions | Sequence[str | Path],
    config: ModelConfig,
    variants: Sequence[Variant],
    *,
    tokenizer: TokenizerOptions | str | Path | None = None,
    budget: Budget | None = None,
    settings: Mapping[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Comparison:
    """Make the folder `out` for a comparison.

    All variants see the same tokens in the same order, unless a variant has its own `seed`.

    Args:
        out: The folder.
        data: Paths of text, or one folder made by `mlxlm.data.prepare`; or DataOptions.
        config: The base model.
        variants: Two or more variants of it.
        tokenizer: Path of a tokenizer, or TokenizerOptions. None: that of the prepared data, or train one.
        budget: `tokens`, or `minutes` for the slowest variant, with their `duty_cycle`; unless `settings` have "steps".
            Default: the compute-optimal tokens of the first variant.
        settings: Fields of `TrainSettings` of all runs.
        phase: See `start_run`.

    Raises:
        ConfigError: There are fewer than two variants, or one can't be trained.
        CheckpointError: `out` exists.
        DataError, TokenizerError: As `start_run`.
    """
    out, data, tokenizer = Path(out), as_data_options(data), as_tokenizer_options(tokenizer)
    budget, settings = budget or Budget(), dict(settings or {})
    _check_names(variants)
    shared = TrainSettings.provisional(settings)
    config = config.with_changes(max_position_embeddings=shared.max_seq_length)  # some overrides depend on it
    configs = [variant.apply_to(config) for variant in variants]
    model = {"config": config_to_hf(config), "variants": [asdict(variant) for variant in variants]}
    check_duration(minutes=budget.minutes, tokens=budget.tokens, steps=settings.get("steps"))
    _variant_settings(variants, configs, settings)
    with atomic_new_folder(out) as folder:
        loaded, shards = prepare_shared_data(folder, data, tokenizer, config.vocab_size, seed=shared.seed, phase=phase)
        configs = [with_tokenizer(variant_config, loaded) for variant_config in configs]
        if settings.get("steps") is None:
            settings["steps"] = _steps(configs, _variant_settings(variants, configs, settings), budget, shards, phase)
        _variant_settings(variants, configs, settings)  # check all variants before the first is trained
        Comparison.write(folder, shards, **model, settings=settings)
    return Comparison.open(out)


def _check_names(variants: Sequence[Variant]) -> None:
    """Raise ConfigError if the variants can't have a folder each."""
    if len(variants) < 2:
        raise ConfigError("a comparison needs two variants or more", f'--variant {BASE} --variant "positions=alibi"')
    # macOS doesn't distinguish names by case or by the composition of accents.
    folders = [unicodedata.normalize("NFC", variant.folder).casefold() for variant in variants]
    for variant, folder in zip(variants, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"two variants are called {variant.folder}", '"another name: ..."')
        if folder in ("data", Comparison.FILE, PLOT_FILE):
            raise ConfigError(f"a variant can't be called {variant.folder}", '"another name: ..."')
        if not variant.name.isprintable() or len(folder.encode()) > _MAX_NAME_BYTES:
            problem = f"{ascii(variant.name[:20])} can't be the name of a variant, which names a folder"
            raise ConfigError(problem, f"at most {_MAX_NAME_BYTES} printable letters")


def _variant_settings(
    variants: Sequence[Variant], configs: Sequence[ModelConfig], settings: Mapping[str, Any]
) -> list[TrainSettings]:
    """Return the provisional settings of each variant. Raises ConfigError for one that can't be trained here."""
    result = []
    for variant, config in zip(variants, configs, strict=True):
        values = {**settings, **variant.settings}
        with variant_errors(variant.name):
            set_default_dtype(values)
            result.append(TrainSettings.provisional(values))
            check_memory(config, result[-1])
    return result


def _steps(
    configs: Sequence[ModelConfig], settings: Sequence[TrainSettings], budget: Budget, shards: Path, phase: Phase
) -> int:
    """Return the steps that the slowest variant can be trained in the minutes, or the steps for the tokens."""
    if not budget.minutes:
        return steps_for(budget.tokens, configs[0], settings[0])
    validation = TokenDataset.open(shards, "validation")
    with phase("benchmarking three training steps of each variant", None):
        probes = [probe(config, s, validation) for config, s in zip(configs, settings, strict=True)]
    seconds, validation_tokens = 60 * budget.minutes * budget.duty_cycle / 100, validation.manifest.validation.tokens
    return min(p.steps_in(seconds, s, validation_tokens) for p, s in zip(probes, settings, strict=True))


def _result(variant: Variant, run: Run) -> Result:
    history = read_run(run.path)

    def last(name: str) -> float:
        value = history.last(name)
        return 0.0 if math.isnan(value) else value

    first = {name: history.steps[name][0] for name in ("tokens", "seconds") if history.steps[name]}
    seconds = last("seconds") - first.get("seconds", 0.0)
    best = history.best
    memory = [event.get("memory") for event in history.events if event["event"] == "finished"]
    return Result(
        name=variant.name,
        path=str(run.path),
        model_type=run.config.model_type,
        parameters=run.config.parameter_count(),
        learning_rate=run.settings.learning_rate,
        step=int(last("step")),
        steps=run.settings.steps,
        tokens=int(last("tokens")),
        seconds=last("seconds"),
        tokens_per_second=(last("tokens") - first.get("tokens", 0.0)) / seconds if seconds > 0 else 0.0,
        memory=memory[-1] if memory else None,
        loss=best and best.loss,
        bits_per_byte=best and best.bits_per_byte,
        finished=is_finished(run),
    )
