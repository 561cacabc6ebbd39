"""Variants of a model trained on the same data, with the same tokenizer and for as many tokens, side by side."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.locations import is_run_folder
from mlxlm.config import ModelConfig
from mlxlm.config.overrides import apply_overrides, infer_field, parse_overrides, parse_value
from mlxlm.data import TokenDataset
from mlxlm.experiments.sweep import (
    check_saved_args,
    is_finished,
    open_or_start_run,
    prepare_shared_data,
    relative_data_path,
    saved_args,
)
from mlxlm.families import config_from_hf, config_to_hf, resolve_model_type
from mlxlm.report import read_run
from mlxlm.report.plots import plot_runs
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.train.budget import check_duration
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.run import Run
from mlxlm.train.run_data import Phase, no_phase
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import set_default_dtype, steps_for
from mlxlm.train.step_benchmark import probe
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import read_json, write_json

FILE = "comparison.json"
PLOT_FILE = "comparison.png"
BASE = "base"  # the variant that changes nothing
# What the variants have in common, and what says so.
_BUDGET = ("batch_size", "max_seq_length", "grad_accumulation_steps", "steps", "time_limit")
_READING = ("eval_every", "eval_tokens", "packing", "document_mask", "mask_prompt")
_SHARED = {
    **dict.fromkeys(_BUDGET, "one budget for all variants"),
    **dict.fromkeys(_READING, "the same for all variants"),
    "vocab_size": "one tokenizer for all variants",
    "max_position_embeddings": "the sequence length, one for all variants",
}
_LONGEST_NAME = 100  # bytes of a folder's name, where file systems have 255 and names of files are made from it
_SETTINGS = {field.name: field.type for field in fields(TrainSettings)}


@dataclass(frozen=True)
class Variant:
    """`parts`: what it changes in the model, see `mlxlm.config.overrides`. `settings`: fields of TrainSettings that it
    has for itself, such as dropout and learning_rate."""

    name: str
    parts: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def read(cls, text: str) -> Variant:
        """ "wide: hidden_size=256, dropout=0.1", "positions=alibi", a word that is the value of one part ("alibi",
        "swiglu"), or "base". Raises ConfigError for anything else."""
        name, colon, rest = (piece.strip() for piece in text.partition(":"))
        if "=" in name:  # "rope_scaling=yarn:4" has a colon, too
            name, colon, rest = text.strip(), "", text.strip()
        if not name or bool(colon) != bool(rest) and colon:
            raise ConfigError(f"{text!r} is no variant", '"alibi: positions=alibi"')
        if not rest:
            found = {} if name == BASE else infer_field(name)
            if found is None:
                raise ConfigError(f"variant {name!r} says nothing", f'"{name}: NAME=VALUE", or {BASE}')
            return cls(name, found, {})
        with _about(name):
            values = parse_overrides(_pieces(rest))
            for key in (key for key in values if key in _SHARED):
                raise ConfigError(f"{key} can't be a variant's own", _SHARED[key])
            own = {key: parse_value(key, value, _SETTINGS[key]) for key, value in values.items() if key in _SETTINGS}
        return cls(name, {key: value for key, value in values.items() if key not in own}, own)

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", self.name).strip("-.") or "variant"


def _pieces(text: str) -> list[str]:
    """What is between the commas of `text`, but for those inside of JSON."""
    found, depth = [""], 0
    for sign in text:
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0:
            found.append("")
        else:
            found[-1] += sign
    return found


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Says of which variant a ConfigError is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"variant {name}: {error.message}", error.hint) from None


@dataclass(frozen=True)
class Result:
    """Where a variant stands: `tokens_per_second` over all its steps but the first, which
    compiles, `memory` MLX's peak in bytes (None before the
    end), `bits_per_byte` the best on the held-out text, `seconds` those of its steps."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A folder of runs: `comparison.json`, `data/` unless it was prepared before, and a run for each variant.

    Train what is unfinished: `for variant in comparison.variants: run = comparison.run(variant); train(run, ...)`.
    """

    path: Path
    config: ModelConfig
    settings: dict[str, Any]
    variants: tuple[Variant, ...]
    data: Path
    saved_args: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Comparison:
        """An existing comparison. Raises ConfigError naming the file, or the variant."""
        path = Path(path)
        if not (path / FILE).is_file():
            raise ConfigError(f"{path} is no comparison: it has no {FILE}", "the --out of compare-architectures")
        values = read_json(path / FILE)
        try:
            config = config_from_hf(values["config"], str(path / FILE))
            variants = tuple(Variant(**variant) for variant in values["variants"])
            texts = [text for v in variants for text in (v.name, *v.parts, *v.parts.values())]
            settings = [values["settings"], *(variant.settings for variant in variants)]
            if not all(isinstance(text, str) for text in texts) or any(own.keys() - _SETTINGS for own in settings):
                raise ValueError
            found = cls(path, config, settings[0], variants, path / values["data"], dict(values["saved_args"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{path / FILE} lacks config, settings, variants, data or asked, or is damaged") from None
        _check(variants)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        return load(self.data / "tokenizer")

    def config_of(self, variant: Variant) -> ModelConfig:
        return _configured(self.config, variant)

    def run(self, variant: Variant, phase: Phase = no_phase) -> Run:
        """The variant's run, made if it isn't there yet."""
        settings = {**self.settings, **variant.settings}
        return open_or_start_run(self.path / variant.folder, self.data, self.config_of(variant), settings, phase)

    def plot(self) -> Path:
        """Write a picture of the curves so far, as PNG; its path."""
        plot_runs({v.name: read_run(self.path / v.folder) for v in self._begun()}, self.path / PLOT_FILE)
        return self.path / PLOT_FILE

    def results(self) -> list[Result]:
        """Of the variants whose runs have begun, in their order."""
        return [_result(variant, Run.open(self.path / variant.folder)) for variant in self._begun()]

    def _begun(self) -> list[Variant]:
        return [variant for variant in self.variants if is_run_folder(self.path / variant.folder)]


def start_comparison(
    out: Path | str,
    sources: Sequence[str | Path],
    config: ModelConfig,
    variants: Sequence[Variant],
    *,
    weights: Sequence[float] | None = None,
    text_column: str | None = None,
    tokenizer: str | Path | None = None,
    tokenizer_type: str = "byte-level",
    vocab_size: int | None = None,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.05,
    on_bad_input: str = "stop",
    minutes: float | None = None,
    tokens: float | None = None,
    duty_cycle: float = 100.0,
    settings: dict[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Comparison:
    """Make the folder `out` for a comparison of `variants` of `config`: tokenizer and data once, the budget fixed. If
    it is there already, made of the same arguments, it is opened.

    Arguments are those of `start_run`. All variants see the same tokens in the same order (but for a `seed` of their
    own): as many as `tokens` or `settings["steps"]` say, as the slowest of them is trained on here in `minutes`, of
    which `duty_cycle` percent are worked, or by default as many as are compute-optimal for the first one.

    Raises ConfigError for less than two variants, for variants that can't work, and for an `out` of something else;
    DataError and TokenizerError as `start_run`.
    """
    out, settings = Path(out), dict(settings or {})
    _check(variants)
    shared = TrainSettings.provisional(settings)
    config = config.with_changes(max_position_embeddings=shared.max_seq_length)  # which some parts go by
    configs = [_configured(config, variant) for variant in variants]
    question = saved_args(
        sources,
        weights=weights and list(weights),
        text_column=text_column,
        tokenizer=tokenizer,
        tokenizer_type=tokenizer_type,
        vocab_size=vocab_size,
        validation=validation,
        validation_fraction=validation_fraction,
        minutes=minutes,
        tokens=tokens,
        settings=settings,
        config=config_to_hf(config),
        variants=[asdict(variant) for variant in variants],
    )
    if (out / FILE).is_file():
        there = Comparison.open(out)
        check_saved_args(out, there.saved_args, question, "comparison", "mlxlm compare-architectures")
        return there
    check_duration(minutes=minutes, tokens=tokens, steps=settings.get("steps"))
    drafts = _drafts(variants, configs, settings)
    with atomic_new_folder(out) as folder:
        loaded_tokenizer, data = prepare_shared_data(
            folder, sources, vocab_size or config.vocab_size, exact=vocab_size is not None, tokenizer=tokenizer,
            tokenizer_type=tokenizer_type, text_column=text_column, weights=weights, validation=validation,
            validation_fraction=validation_fraction, on_bad_input=on_bad_input, seed=shared.seed, phase=phase,
        )  # fmt: skip
        ids = {
            "bos_token_id": loaded_tokenizer.bos_id,
            "eos_token_id": loaded_tokenizer.eos_id,
            "pad_token_id": loaded_tokenizer.pad_id,
        }
        configs = [variant.with_changes(vocab_size=loaded_tokenizer.vocab_size, **ids) for variant in configs]
        if minutes:
            held_out = TokenDataset.open(data, "validation")
            with phase("trying three training steps of each variant", None):
                timed = [(probe(c, d, held_out), d) for c, d in zip(configs, drafts, strict=True)]
            tokens_held_out = held_out.manifest.validation.tokens
            steps = min(
                found.steps_in(60 * minutes * duty_cycle / 100, provisional, tokens_held_out)
                for found, provisional in timed
            )
        else:
            steps = settings.get("steps") or steps_for(tokens, configs[0], drafts[0])
        _drafts(variants, configs, {**settings, "steps": steps})  # of all, before the first is trained
        values = {
            "config": config_to_hf(config), "settings": {**settings, "steps": steps},
            "variants": question["variants"], "data": relative_data_path(data, folder),
            "saved_args": question,
        }  # fmt: skip
        write_json(folder / FILE, values)
    return Comparison.open(out)


def _check(variants: Sequence[Variant]) -> None:
    if len(variants) < 2:
        raise ConfigError("a comparison needs two variants or more", f'--variant {BASE} --variant "positions=alibi"')
    # macOS takes names for one that differ in case or in how accents are composed.
    folders = [unicodedata.normalize("NFC", variant.folder).casefold() for variant in variants]
    for variant, folder in zip(variants, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"two variants are called {variant.folder}", '"another name: ..."')
        if folder in ("data", FILE, PLOT_FILE):
            raise ConfigError(f"a variant can't be called {variant.folder}", '"another name: ..."')
        if not variant.name.isprintable() or len(folder.encode()) > _LONGEST_NAME:
            what = f"{ascii(variant.name[:20])} can't be the name of a variant, which has a folder of that name"
            raise ConfigError(what, f"at most {_LONGEST_NAME} letters")


def _configured(config: ModelConfig, variant: Variant) -> ModelConfig:
    with _about(variant.name):
        return resolve_model_type(apply_overrides(config, variant.parts, _SHARED))


def _drafts(
    variants: Sequence[Variant], configs: Sequence[ModelConfig], settings: Mapping[str, Any]
) -> list[TrainSettings]:
    """The settings of each variant, but for the learning rate. Raises ConfigError for what can't be trained here."""
    found = []
    for variant, config in zip(variants, configs, strict=True):
        values = {**settings, **variant.settings}
        with _about(variant.name):
            set_default_dtype(values)
            found.append(TrainSettings.provisional(values))
            check_memory(config, found[-1])
    return found


def _result(variant: Variant, run: Run) -> Result:
    history = read_run(run.path)

    def last(figure: str) -> float:
        value = history.last(figure)
        return 0.0 if math.isnan(value) else value

    first = {name: history.steps[name][0] for name in ("tokens", "seconds") if history.steps[name]}
    seconds = last("seconds") - first.get("seconds", 0.0)
    rate = (last("tokens") - first.get("tokens", 0.0)) / seconds if seconds > 0 else 0.0
    _, loss, bits = history.best or (None, None, None)
    ends = [entry for entry in history.events if entry["event"] == "finished"]
    return Result(
        variant.name, str(run.path), run.config.model_type, run.config.parameter_count(), run.settings.learning_rate,
        int(last("step")), run.settings.steps, int(last("tokens")), last("seconds"), rate,
        ends[-1].get("memory") if ends else None, loss, bits, is_finished(run),
    )  # fmt: skip
