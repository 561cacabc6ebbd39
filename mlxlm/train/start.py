"""From text to a run that is ready to train: tokenizer, token shards, model and settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU
from mlxlm.config import ModelConfig
from mlxlm.data import CHAT_TEMPLATE, DataOptions, Manifest, TokenDataset, TrainBatches
from mlxlm.plan.textbook import compute_optimal_tokens
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.auto_size import auto_size, guess_vocab_size
from mlxlm.train.budget import (
    MEASURING_LABEL,
    TRAINING_FRACTION,
    Budget,
    batch_settings,
    min_rows,
    seconds_per_token,
    time_limit_settings,
)
from mlxlm.train.events import Forecast, ModelSizeChosen
from mlxlm.train.log import RunLog
from mlxlm.train.memory_limits import check_memory, fits_memory
from mlxlm.train.optimizers import default_learning_rate, default_weight_decay
from mlxlm.train.run import Run
from mlxlm.train.run_data import (
    Phase,
    as_data_options,
    as_tokenizer_options,
    check_shards,
    check_sources,
    existing_tokenizer,
    limit_text,
    no_phase,
    prepare_shards,
    train_tokenizer,
)
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.step_benchmark import BENCHMARK_LABEL, MIN_STEPS_TO_BENCHMARK, probe
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import check_not_exists, working_folder

DEVICE_DTYPE = "float32" if ON_CPU else "bfloat16"  # MLX's 16-bit products on a CPU are many times slower


def start_run(
    out: Path | str,
    data: DataOptions | Sequence[str | Path],
    config: ModelConfig | None = None,
    *,
    tokenizer: TokenizerOptions | str | Path | None = None,
    minutes: float | None = None,
    budget: Budget | None = None,
    settings: Mapping[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run directory `out`, ready for `train`.

    A run of 100 steps or more, or with a time limit, is benchmarked: its log begins with a Forecast.

    Args:
        out: The new folder.
        data: Paths of text, or one folder made by `mlxlm.data.prepare`; or DataOptions.
        config: The model. It gets the tokenizer's vocabulary size and special tokens, and the sequence length as its
            context length, because it never sees more. None: the best model for `minutes`, see `auto_size`.
        tokenizer: Path of a tokenizer, or TokenizerOptions. None: that of the prepared data, or train one.
        minutes: Short for `budget=Budget(minutes=minutes)`.
        budget: How long to train, unless `settings` have "steps". Default: 20 tokens per parameter. With minutes, what
            is left of them becomes the `time_limit` of the settings, and missing settings (batch size,
            sequence length, validation) follow from the time. Of a long text, only a part is used (`TextLimited`).
        settings: Fields of `TrainSettings`. `grad_accumulation_steps` are those of one process. The learning rate
            defaults by model size, weight decay by the number of epochs.
        phase: Called with a label and a total in bytes (or None) for each long phase. Returns a context that yields a
            function, which is called with the bytes done.

    Raises:
        CheckpointError: `out` exists.
        DataError, TokenizerError, ConfigError: For what can't work, as early as it can be known.
    """
    out = Path(out)
    check_not_exists(out, CheckpointError, f"mlxlm pretrain --resume {shlex.quote(str(out))}, or another --out")
    data, options = as_data_options(data), as_tokenizer_options(tokenizer)
    budget, values = merge_budget(budget, minutes, settings)
    if config is None and budget.minutes is None:
        raise ConfigError("there is no model, and no time to choose one by", "a preset, or minutes")
    seed = TrainSettings.provisional(values).seed
    prepared = check_sources(data, options)

    existing = existing_tokenizer(options, prepared)
    vocab_size = existing.vocab_size if existing else _vocab_size_to_train(options, config, data, budget)
    token_seconds = None if config is None else check_feasible(config, vocab_size, values, budget, phase)
    limited = None
    if budget.minutes is not None and not prepared:

        def prepare_sample(sample: DataOptions, folder: Path) -> None:
            fewer = replace(options, vocab_size=None)  # a sample may not support as many tokens
            prepare_shards(sample, existing or train_tokenizer(sample, fewer, vocab_size, seed), folder, seed)

        data, limited = limit_text(data, budget.seconds_left(), prepare_sample, phase)
    run_tokenizer = existing or train_tokenizer(data, options, vocab_size, seed, phase)

    with working_folder(out) as workspace:
        shards = prepared or prepare_shards(data, run_tokenizer, workspace / "data", seed, phase)
        config, values, choice = choose_model(config, values, shards, run_tokenizer, budget, token_seconds, phase)
        draft = TrainSettings.provisional(values)
        values.setdefault("learning_rate", default_learning_rate(config, draft.optimizer))
        if budget.minutes is None:
            values["steps"] = budget.steps or steps_for(budget.tokens, config, draft)
        num_rows = count_rows(shards, draft)
        final_settings, forecast = finalize_settings(config, values, shards, num_rows, budget, phase)
        run = Run.create(out, config, final_settings, run_tokenizer, shards, move_data=not prepared)
    RunLog(run.log_file).record(limited, choice, forecast)
    return run


def merge_budget(
    budget: Budget | None, minutes: float | None, settings: Mapping[str, Any] | None
) -> tuple[Budget, dict[str, Any]]:
    """Return one budget, and the settings with a dtype, the steps, and the accumulation of all processes."""
    values, budget = dict(settings or {}), budget or Budget()
    minutes, steps = budget.minutes if minutes is None else minutes, values.get("steps")
    budget = replace(budget, minutes=minutes, steps=budget.steps if steps is None else steps)
    if budget.steps is not None:
        values["steps"] = budget.steps
    accumulation = values.get("grad_accumulation_steps", TrainSettings.grad_accumulation_steps)
    values["grad_accumulation_steps"] = accumulation * budget.num_processes
    set_default_dtype(values)
    return budget, values


def set_default_dtype(values: dict[str, Any]) -> None:
    """Set the dtype of the settings `values`, if they have none. Raises ConfigError for one that is slow here."""
    values.setdefault("dtype", DEVICE_DTYPE)
    if ON_CPU and values["dtype"] != "float32":
        hint = "float32, the default on a CPU"
        raise ConfigError(f"a CPU computes {values['dtype']} products many times slower than float32", hint)


def _vocab_size_to_train(
    options: TokenizerOptions, config: ModelConfig | None, data: DataOptions, budget: Budget
) -> int:
    """Return the vocabulary size of a tokenizer to train: of the options, of the configuration, or by the time."""
    if options.vocab_size is not None:
        return options.vocab_size
    if config is not None:
        return config.vocab_size
    seconds = budget.compute_seconds_left() * budget.num_processes
    return guess_vocab_size(seconds, data.sources, data.text_column, data.on_bad_input)


def check_feasible(
    config: ModelConfig, vocab_size: int, values: Mapping[str, Any], budget: Budget, phase: Phase
) -> float | None:
    """Raise ConfigError if the model takes more memory or more time than there is, before the data is prepared.

    Returns:
        The measured training time per token if there is a time limit.
    """
    settings = TrainSettings.provisional(values).per_process(budget.num_processes)
    if budget.minutes is not None:
        settings = replace(settings, batch_size=1)  # the batch size may follow from the time
    no_special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = _model_to_train(config.with_changes(vocab_size=vocab_size, **no_special_tokens), settings)
    if budget.minutes is None:
        return None
    with phase(MEASURING_LABEL, None):
        return seconds_per_token(config, budget.compute_seconds_left(), values, budget.num_processes)


def choose_model(
    config: ModelConfig | None,
    values: dict[str, Any],
    shards: Path,
    tokenizer: Tokenizer,
    budget: Budget,
    token_seconds: float | None,
    phase: Phase,
) -> tuple[ModelConfig, dict[str, Any], ModelSizeChosen | None]:
    """Return the model for `tokenizer`, the settings with a batch size and a sequence length, and the choice if any.

    Also gives the tokenizer a chat template if the data has conversations.
    """
    manifest, choice, fixed_batch_size = Manifest.read(shards), None, "batch_size" in values
    seconds, processes = budget.compute_seconds_left(), budget.num_processes
    if config is None:
        with phase("choosing a model", None):
            tokens, law = manifest.train.tokens, budget.scaling_law
            config, values, choice = auto_size(seconds, tokens, tokenizer.vocab_size, values, law, processes)
    elif token_seconds is not None:
        values = batch_settings(config, TRAINING_FRACTION * seconds / token_seconds, values)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = config.with_changes(vocab_size=tokenizer.vocab_size, **ids)
    if budget.minutes is not None and not fixed_batch_size:
        values["batch_size"] = _fitting_batch_size(config, values, budget, phase)
    settings = TrainSettings.provisional(values)
    config = _model_to_train(config, settings.per_process(processes))
    check_shards(manifest, tokenizer, settings.max_seq_length, shards)
    tokenizer.chat_template = None  # without conversations in the text the model knows no roles: it continues text
    if manifest.num_conversations:
        tokenizer.chat_template = CHAT_TEMPLATE
        # An answer ends with the end of its turn, a text with the end of its document.
        config = config.with_changes(eos_token_id=[tokenizer.eos_token_id, tokenizer.special_tokens["<|end|>"]])
    return config, values, choice


def _model_to_train(config: ModelConfig, settings: TrainSettings) -> ModelConfig:
    """Return the configuration to train. Raises ConfigError if the machine lacks the memory for it."""
    config = config.with_changes(max_position_embeddings=settings.max_seq_length, quantization=None)
    check_memory(config, settings)
    return config


def _fitting_batch_size(config: ModelConfig, values: Mapping[str, Any], budget: Budget, phase: Phase) -> int:
    """Return the batch size, raised to use all cores and lowered to fit the memory."""
    batch_size = values["batch_size"]
    if batch_size < platform.cpu_cores():
        with phase(MEASURING_LABEL, None):
            batch_size = max(batch_size, min_rows(config, values))
    settings = TrainSettings.provisional(values).per_process(budget.num_processes)
    while batch_size > 1 and not fits_memory(config, replace(settings, batch_size=batch_size)):
        batch_size //= 2
    return batch_size


def count_rows(shards: Path, settings: TrainSettings) -> int:
    """Return the rows of an epoch."""
    data, length, seed = TokenDataset.open(shards, "train"), settings.max_seq_length, settings.seed
    return TrainBatches(data, 1, length, seed, packing=settings.packing).rows  # batches of 1 need no padding


def finalize_settings(
    config: ModelConfig, values: dict[str, Any], shards: Path, num_rows: int, budget: Budget, phase: Phase
) -> tuple[TrainSettings, Forecast | None]:
    """Return the settings of the run, and a forecast if the run is long enough to benchmark it first.

    `values` have the steps, unless the budget has minutes; `num_rows` are the rows of an epoch.

    Raises:
        DataError: There is no answer to validate on.
    """
    settings, validation_data = TrainSettings.provisional(values), TokenDataset.open(shards, "validation")
    if settings.mask_prompt and not (validation_data.bytes and validation_data.num_targets()):
        hint = "more conversations, or --validation FILE"
        raise DataError("the conversations that are held out for validation have no answers, or empty ones", hint)
    validation_tokens, benchmark = validation_data.manifest.validation.tokens, None
    if budget.minutes is not None or values["steps"] >= MIN_STEPS_TO_BENCHMARK:
        with phase(BENCHMARK_LABEL, None):
            benchmark = probe(config, settings.per_process(budget.num_processes), validation_data)
        if budget.minutes is not None:
            values = time_limit_settings(benchmark, budget, values, validation_tokens)
    epochs = values["steps"] * settings.rows_per_step / num_rows
    values.setdefault("weight_decay", default_weight_decay(settings.optimizer, epochs))
    settings = TrainSettings(**values)
    return settings, benchmark.forecast(settings, validation_tokens) if benchmark else None


def steps_for(tokens: float | None, config: ModelConfig, settings: TrainSettings) -> int:
    """Return the steps that see `tokens`; by default as many as are compute-optimal for the model."""
    total = compute_optimal_tokens(config.parameter_count()) if tokens is None else tokens
    return max(1, -(-int(total) // settings.tokens_per_step))
