"""From a person's text to a run that is ready to train: tokenizer, shards, configuration, settings."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from mlxlm.backend import device, platform
from mlxlm.backend.mlx import ON_CPU
from mlxlm.config import ModelConfig
from mlxlm.data import (
    CHAT_TEMPLATE,
    DataOptions,
    Manifest,
    TokenDataset,
    TrainBatches,
    prepare,
    total_bytes,
    training_texts,
)
from mlxlm.data.manifest import is_prepared
from mlxlm.data.sources import unseekable_source
from mlxlm.plan import Training, suggest_change, training_memory
from mlxlm.plan.advice import usable_memory
from mlxlm.plan.scaling_law import ScalingLaw
from mlxlm.plan.textbook import compute_optimal_tokens
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.train.auto_size import auto_size, guess_vocab_size
from mlxlm.train.log import RunLog
from mlxlm.train.optimizers import default_learning_rate, default_weight_decay
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step_benchmark import BENCHMARK_LABEL, MIN_STEPS_TO_BENCHMARK, probe
from mlxlm.train.time_budget import (
    MEASURING_LABEL,
    TRAINING_FRACTION,
    batch_settings,
    min_rows,
    seconds_per_token,
    validation_settings,
)
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import check_not_exists, working_folder
from mlxlm.utils.formatting import human_bytes, human_seconds

DEVICE_DTYPE = "float32" if ON_CPU else "bfloat16"  # MLX's products of 16 bits on a CPU are many times slower
_NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # until there is a tokenizer

Phase = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]


class TooFewTokensError(DataError):
    """The text is shorter than one sequence."""


def no_phase(_label: str, _total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing: the default for `phase`."""
    return nullcontext(lambda _n: None)


def start_run(
    out: Path | str,
    sources: Sequence[str | Path],
    config: ModelConfig | None,
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
    start_time: float | None = None,
    scaling_law: ScalingLaw | None = None,
    settings: dict[str, Any] | None = None,
    num_processes: int = 1,
    stdin: IO[bytes] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run `out` that trains `config` on `sources`, or the model that `mlxlm.train.auto_size` finds best for the
    `minutes` there are.

    sources: what `mlxlm.data.read_documents` takes, or one folder made by `mlxlm.data.prepare`.
    weights: for each of the sources the share of the tokens to be drawn from it; None: each as long as it is.
    text_column: of tables and JSON lines, see `mlxlm.data.read_documents`.
    tokenizer: a folder or file; None takes the prepared data's, or trains one of `tokenizer_type` with `vocab_size`
        tokens (default: the configuration's, or as many as the text supports) on the sources, without what is held out
        for validation.
    on_bad_input: "stop" or "skip", see `mlxlm.data.BadInput`; the manifest says how much was skipped.
    minutes, tokens: how long to train, instead of `settings["steps"]`; by default 20 tokens a parameter. Minutes
        count from `start_time` on (of time.monotonic(); None: from here on): what is left of them is the settings'
        `time_limit`, to which the steps are fitted as the run goes, see `train`. `duty_cycle` percent of them will be worked
        (see `PowerPolicy`).
        With minutes, what the settings leave open of batch, sequence length and validation follows from the time.
        A run of 100 steps or more is probed, and one with minutes: its log begins with the Forecast.
    scaling_law: of the user's own runs, for the choice; see `mlxlm.scaling`.
    settings: fields of TrainSettings; the learning rate defaults by model size, weight decay by the passes over the
        text.
    num_processes: how many processes will train it together: "accumulate" is what each of them adds, and the run's own is
        that of all, so that any number of processes that divides it can go on.
    phase: called with a label and a total in bytes (or None) for each phase that takes a while; the context
        it returns yields a function to be called with the bytes done.

    The configuration gets the tokenizer's vocabulary size and special ids, and the sequence length as its
    context: the model never sees more.

    Raises CheckpointError if `out` exists, and DataError, TokenizerError or ConfigError for what can't work,
    as early as it can be known.
    """
    start_time, out = time.monotonic() if start_time is None else start_time, Path(out)
    check_not_exists(out, CheckpointError, f"mlxlm pretrain --resume {shlex.quote(str(out))}, or another --out")
    values = dict(settings or {})
    values["grad_accumulation_steps"] = (
        values.get("grad_accumulation_steps", TrainSettings.grad_accumulation_steps) * num_processes
    )
    check_duration(minutes=minutes, tokens=tokens, steps=values.get("steps"))
    if config is None and minutes is None:
        raise ConfigError("no model is given, and no time to choose one by", "a preset, or minutes")
    set_default_dtype(values)
    provisional = TrainSettings.provisional(values)
    own = replace(
        provisional, grad_accumulation_steps=provisional.grad_accumulation_steps // num_processes
    )  # what this process does of a step
    prepared = prepared_source(sources)
    if prepared and validation:
        raise DataError(f"{prepared} is prepared already, with its own validation part", "mlxlm prepare --validation")
    if prepared and weights:
        raise DataError(f"{prepared} is prepared already, with its own weights", "mlxlm prepare PATH=WEIGHT ...")
    if (once := unseekable_source(sources)) is not None and tokenizer is None:
        hint = "a file, or mlxlm pretrain --tokenizer PATH"
        raise DataError(f"{once} can be read only once, so it can't train a tokenizer too", hint)
    exact = vocab_size is not None
    if vocab_size is None and config is not None:
        vocab_size = config.vocab_size
    if vocab_size is None and not prepared and tokenizer is None:
        vocab_size = guess_vocab_size(
            60 * minutes * duty_cycle / 100 * num_processes, sources, text_column, on_bad_input
        )
    data_options = DataOptions(
        sources,
        weights=weights,
        text_column=text_column,
        validation=validation,
        validation_fraction=validation_fraction,
        on_bad_input=on_bad_input,
        stdin=stdin,
    )
    seed = provisional.seed
    loaded_tokenizer = token_seconds = None
    if prepared or tokenizer is not None:
        loaded_tokenizer = get_tokenizer(
            prepared or data_options, tokenizer, tokenizer_type, vocab_size, seed, phase, exact
        )
        vocab_size = loaded_tokenizer.vocab_size
    if config is not None and minutes is None:
        config = _fitted(config, own, {"vocab_size": vocab_size, **_NO_IDS})
    elif config is not None:
        with phase(MEASURING_LABEL, None):
            available = time_left(minutes, start_time) * duty_cycle / 100
            smallest = _fitted(config, replace(own, batch_size=1), {"vocab_size": vocab_size, **_NO_IDS})
            token_seconds = seconds_per_token(smallest, available, values, num_processes)
    if loaded_tokenizer is None:
        loaded_tokenizer = get_tokenizer(
            prepared or data_options, tokenizer, tokenizer_type, vocab_size, seed, phase, exact
        )
    ids = {
        "bos_token_id": loaded_tokenizer.bos_id,
        "eos_token_id": loaded_tokenizer.eos_id,
        "pad_token_id": loaded_tokenizer.pad_id,
    }
    workspace = working_folder(out)
    try:
        data = prepared or workspace / "data"
        if not prepared:
            with phase("preparing tokens", total_bytes([*sources, *validation])) as advance:
                prepare(data_options, loaded_tokenizer, data, seed=seed, progress=advance)
        manifest, choice = Manifest.read(data), None
        if minutes:
            worked, batch_given = time_left(minutes, start_time) * duty_cycle / 100, "batch_size" in values
            if config is None:
                with phase("choosing a model", None):
                    choice = auto_size(
                        worked, manifest.train.tokens, loaded_tokenizer.vocab_size, values, scaling_law, num_processes
                    )
                config, values = choice.config, choice.settings
            else:
                values = batch_settings(config, TRAINING_FRACTION * worked / token_seconds, values)
            config = config.with_changes(vocab_size=loaded_tokenizer.vocab_size, **ids)
            if not batch_given and values["batch_size"] < platform.cpu_cores():
                with phase(MEASURING_LABEL, None):
                    values["batch_size"] = max(values["batch_size"], min_rows(config, values))
            while not batch_given and values["batch_size"] > 1 and not _fits(config, values, num_processes):
                values["batch_size"] //= 2
            provisional = TrainSettings.provisional(values)
            own = replace(provisional, grad_accumulation_steps=provisional.grad_accumulation_steps // num_processes)
        config = _fitted(config, own, {"vocab_size": loaded_tokenizer.vocab_size, **ids})
        _check_data(manifest, loaded_tokenizer, provisional.max_seq_length, data)
        if manifest.num_conversations:
            # An answer ends with the end of its turn, a text with the end of its document.
            config = config.with_changes(
                eos_token_id=[loaded_tokenizer.eos_id, loaded_tokenizer.special_tokens["<|end|>"]]
            )
        # Without conversations in the text there are no roles to speak of: such a model continues texts.
        loaded_tokenizer.chat_template = CHAT_TEMPLATE if manifest.num_conversations else None
        values.setdefault("learning_rate", default_learning_rate(config, provisional.optimizer))
        steps = None if minutes else values.get("steps") or steps_for(tokens, config, provisional)
        found = None
        if minutes or steps >= MIN_STEPS_TO_BENCHMARK:
            with phase(BENCHMARK_LABEL, None):
                found = probe(config, own, TokenDataset.open(data, "validation"))
        if minutes:
            values["time_limit"] = time_left(minutes, start_time)
            values = validation_settings(found, values["time_limit"], values)
            provisional = TrainSettings.provisional(values)
            steps = found.steps_in(values["time_limit"] * duty_cycle / 100, provisional, manifest.validation.tokens)
        rows = TrainBatches(
            TokenDataset.open(data, "train"),
            1,
            provisional.max_seq_length,
            provisional.seed,
            packing=provisional.packing,
        ).rows  # which padding doesn't make more of
        passes = steps * provisional.batch_size * provisional.grad_accumulation_steps / rows
        values.setdefault("weight_decay", default_weight_decay(provisional.optimizer, passes))
        settled = TrainSettings(**{**values, "steps": steps})
        run = Run.create(out, config, settled, loaded_tokenizer, data, move_data=not prepared)
        log = RunLog(run.log_file)
        if choice is not None:
            log.record(choice.event)
        if found is not None:
            log.record(found.forecast(settled, manifest.validation.tokens))
        return run
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def set_default_dtype(values: dict[str, Any]) -> None:
    """Set the dtype of the settings `values` where they have none. Raises ConfigError for one that is no use here."""
    values.setdefault("dtype", DEVICE_DTYPE)
    if ON_CPU and values["dtype"] != "float32":
        hint = "float32, the default on a CPU"
        raise ConfigError(f"a CPU computes {values['dtype']} products many times slower than float32", hint)


def check_duration(**given: float | None) -> None:
    """Raise ConfigError unless at most one of these says how long to train, and says it in a positive number."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each say how long to train", "only one of them")
    for name, value in chosen.items():
        if not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ConfigError(f"{name} is {value!r}, it must be a positive number")


def steps_for(tokens: float | None, config: ModelConfig, provisional: TrainSettings) -> int:
    """Steps that see `tokens`, by default as many as are compute-optimal for the model."""
    budget = compute_optimal_tokens(config.parameter_count()) if tokens is None else int(tokens)
    return max(1, -(-budget // provisional.tokens_per_step))


def time_left(minutes: float, start_time: float) -> float:
    """Seconds that training has, of minutes that count since `start_time`. Raises ConfigError if there are none."""
    spent = time.monotonic() - start_time
    if (left := 60 * minutes - spent) <= 0:
        problem = f"preparing the training took {human_seconds(spent)} of the {human_seconds(60 * minutes)} given"
        raise ConfigError(problem, f"--minutes {math.ceil(2 * spent / 60)}")
    return left


def prepared_source(sources: Sequence[str | Path]) -> Path | None:
    """The folder of prepared data that `sources` is, None for texts. Raises DataError for one among others."""
    folders = [Path(s) for s in sources if is_prepared(s)]
    if folders and len(sources) > 1:
        hint = "it alone, or text files"
        raise DataError(f"{folders[0]} is prepared data and can't be mixed with other sources", hint)
    return folders[0] if folders else None


def get_tokenizer(
    data: Path | DataOptions,
    path: str | Path | None,
    tokenizer_type: str,
    vocab_size: int | None,
    seed: int,
    phase: Phase,
    exact: bool,
) -> Tokenizer:
    """The one at `path`, that of prepared data, or one trained on `training_texts`; `exact`: see `mlxlm.tokenizer.train`."""
    if path is not None:
        return load(path)
    if isinstance(data, Path):
        return load(data / "tokenizer")
    with phase(f"training a {tokenizer_type} tokenizer of {vocab_size} tokens", total_bytes(data.sources)) as advance:
        return train(training_texts(data, seed=seed, progress=advance), vocab_size, tokenizer_type, exact=exact)


def _fitted(config: ModelConfig, settings: TrainSettings, changes: dict[str, Any]) -> ModelConfig:
    """The configuration to train, if this machine has the memory for it, by `mlxlm.plan`."""
    config = config.with_changes(max_position_embeddings=settings.max_seq_length, quantization=None, **changes)
    check_memory(config, settings)
    return config


def _fits(config: ModelConfig, values: dict[str, Any], num_processes: int) -> bool:
    """Whether this machine has the memory to train with the settings `values`."""
    provisional = TrainSettings.provisional(values)
    own = Training.of(
        replace(provisional, grad_accumulation_steps=provisional.grad_accumulation_steps // num_processes)
    )
    return training_memory(config, own).total <= usable_memory(device.device_memory())


def check_memory(config: ModelConfig, settings: TrainSettings, preset: str = "--preset") -> None:
    """Raise a ConfigError if training takes more memory than the device has for it. preset: see `suggest_change`."""
    training, there = Training.of(settings), device.device_memory()
    if (needed := training_memory(config, training).total) > usable_memory(there):
        change = suggest_change(config, training, there, preset)
        hint = f"{change.text}, which takes {human_bytes(change.needed)}" if change else "a smaller model"
        there = human_bytes(usable_memory(there))
        raise ConfigError(f"training this takes about {human_bytes(needed)} of memory, there are {there} for it", hint)


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, data: Path) -> None:
    """Raise a DataError if `data`, of this manifest, has another tokenizer's tokens."""
    if manifest.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{data} was prepared with another tokenizer", "the one it was prepared with")


def _check_data(manifest: Manifest, tokenizer: Tokenizer, length: int, data: Path) -> None:
    """Raise a DataError for other tokens than the tokenizer's, and for too few of them."""
    check_tokenizer(manifest, tokenizer, data)
    if manifest.train.tokens < length + 1:
        there = manifest.train.tokens
        hint = f"--max-seq-length {there - 1}, or more text" if there > 2 else "more text"
        raise TooFewTokensError(f"the text has {there} tokens, less than one sequence of {length}", hint)
    if manifest.validation.tokens < 2 or manifest.validation.bytes == 0:
        raise DataError("nothing is held out for validation", "more documents, or mlxlm pretrain --validation FILE")
