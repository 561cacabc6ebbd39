"""From text to a run that is ready to train: tokenizer, token shards, model and settings."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU
from mlxlm.checkpoint import Checkpoint, open_tokenizer
from mlxlm.config import ModelConfig
from mlxlm.config.mup import check_mup
from mlxlm.data import CHAT_TEMPLATE, DataOptions, Manifest, prepare, total_bytes
from mlxlm.data.manifest import prepared_source
from mlxlm.data.preparation import Encode, training_texts
from mlxlm.data.sources import unseekable_source
from mlxlm.plan.flops import TOKENS_PER_PARAMETER
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.train.base_model import create_from_base, open_base_model, set_base_defaults
from mlxlm.train.budget import (
    MEASURING_LABEL,
    TRAINING_FRACTION,
    Budget,
    auto_size,
    batch_settings,
    guess_vocab_size,
    min_rows,
    seconds_per_token,
    time_limit_settings,
)
from mlxlm.train.distillation import check_teacher
from mlxlm.train.events import Forecast, ModelSizeChosen, RunLog, TextLimited
from mlxlm.train.memory_limits import check_memory, fits_memory
from mlxlm.train.objectives import open_batches, open_validation
from mlxlm.train.optimizers import default_learning_rate, default_weight_decay
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.step_benchmark import BENCHMARK_LABEL, MIN_STEPS_TO_BENCHMARK, probe
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import check_not_exists, working_folder

DEVICE_DTYPE = "float32" if ON_CPU else "bfloat16"  # MLX's 16-bit products on a CPU are many times slower
PREPARATION_FRACTION = 0.15  # of the time of a run, at most, for its tokenizer and its tokens
_SAMPLE_BYTES = 1 << 18  # of text, to measure the speed of preparing it
_MIN_BYTES_PER_SECOND = 30_000  # of the time of a run: this much text is prepared in time on any machine
Phase = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]


class TooFewTokensError(DataError):
    """The text is shorter than one sequence."""


def no_phase(_label: str, _total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing: the default for `phase`."""
    return nullcontext(lambda _n: None)


def start_run(
    out: Path | str,
    data: DataOptions | Sequence[str | Path],
    config: ModelConfig | None = None,
    *,
    init: str | Path | None = None,
    tokenizer: TokenizerOptions | str | Path | None = None,
    minutes: float | None = None,
    budget: Budget | None = None,
    settings: Mapping[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run directory `out`, ready for `train`; with `init`, for `train(..., resume=True)`.

    The text is read twice: to train a tokenizer, if none is given, and to tokenize it. A run of 100 steps or more, or
    with a time limit, is benchmarked: its log begins with a Forecast.

    With `init`, the run begins with a checkpoint of step 0, that model in float32, and first validates it. Tokenizer,
    chat template, special tokens and context length stay those of the model.

    Args:
        out: The new folder.
        data: Paths of text, or one folder made by `mlxlm.data.prepare`; or DataOptions.
        config: The model. It gets the tokenizer's vocabulary size and special tokens, and the sequence length as its
            context length, because it never sees more. None: the best model for `minutes`, see `auto_size`.
        init: A model to train further, see `open_checkpoint`, instead of `config` and `tokenizer`.
        tokenizer: Path of a tokenizer, or TokenizerOptions. None: that of the prepared data, or train one.
        minutes: Short for `budget=Budget(minutes=minutes)`.
        budget: How long to train, unless `settings` have "steps". Default: 20 tokens per parameter, with `init` one
            epoch. With minutes, the remaining time becomes the `time_limit` of the settings, and missing settings
            (batch size, sequence length, validation) are chosen for it. Of a long text, only a part is used
            (`TextLimited`).
        settings: Fields of `TrainSettings`. `grad_accumulation_steps` are those of one process. The learning rate
            defaults by model size, with `init` to a fifth of that; weight decay by the number of epochs; the optimizer
            of a model that is chosen for `minutes` to Muon.
        phase: Called with a label and a total in bytes (or None) for each long phase. Returns a context that yields a
            function, which is called with the bytes done.

    Raises:
        CheckpointError: `out` exists.
        DataError, TokenizerError, ConfigError: For what can't work, as early as it can be known.
    """
    out = Path(out)
    check_not_exists(out, CheckpointError, f"mlxlm pretrain --resume {shlex.quote(str(out))}, or another `out`")
    data, options = as_data_options(data), as_tokenizer_options(tokenizer)
    budget, values = merge_budget(budget, minutes, settings)
    timed, processes = budget.minutes is not None, budget.num_processes
    base, base_tokenizer = (None, None) if init is None else open_base_model(init, "trained further")
    if base is not None:
        if config is not None or options != TokenizerOptions():
            raise ConfigError(f"{init} has its own architecture and tokenizer", "`init` without `config`, `tokenizer`")
        config, options = base.config, TokenizerOptions(init)
        set_base_defaults(values, config)
    if config is None and not timed:
        raise ConfigError("there is no model, and no time to choose one by", "a preset, or minutes")
    if config is None:
        values.setdefault("optimizer", "muon")  # the lower loss in the same time, see docs/recipes.md
    seed = TrainSettings.provisional(values).seed
    prepared = check_sources(data, options)

    if options == TokenizerOptions() and prepared is None and "teacher" in values:
        options = TokenizerOptions(values["teacher"])

    # Tokenizer: its size decides the size of the model, which must fit the memory and the time
    run_tokenizer = base_tokenizer or existing_tokenizer(options, prepared)
    if run_tokenizer is not None:
        check_teacher(values, run_tokenizer, config.vocab_size if base and config else run_tokenizer.vocab_size)
        vocab_size = run_tokenizer.vocab_size
    elif options.vocab_size is not None:
        vocab_size = options.vocab_size
    elif config is not None:
        vocab_size = config.vocab_size
    else:
        vocab_size = guess_vocab_size(budget.compute_seconds_left() * processes, data.sources)
    token_seconds = None
    if config is not None:
        draft = TrainSettings.provisional(values).per_process(processes)
        draft = replace(draft, batch_size=1) if timed else draft  # the batch size may follow from the time
        no_special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        untrained = config if base else config.with_changes(vocab_size=vocab_size, **no_special_tokens)
        untrained = _model_to_train(untrained, draft, base)
        if timed:
            with phase(MEASURING_LABEL, None):
                token_seconds = seconds_per_token(untrained, budget.compute_seconds_left(), values, processes)
    limited = None
    if timed and budget.counts_preparation and not prepared:

        def prepare_sample(sample: DataOptions, folder: Path) -> None:
            fewer = replace(options, vocab_size=None)  # a sample may not support as many tokens
            prepare_shards(sample, run_tokenizer or train_tokenizer(sample, fewer, vocab_size, seed), folder, seed)

        data, limited = limit_text(data, budget.seconds_left(), prepare_sample, phase)
    run_tokenizer = run_tokenizer or train_tokenizer(data, options, vocab_size, seed, phase)

    with working_folder(out) as workspace:
        shards = prepared or prepare_shards(data, run_tokenizer, workspace / "data", seed, phase)
        if not budget.counts_preparation:
            budget = replace(budget, start_time=time.monotonic())
        if config is not None and base is None:
            config = with_tokenizer(config, run_tokenizer)
        config, values, choice = _choose_model(config, values, shards, run_tokenizer, budget, token_seconds, phase)
        draft = TrainSettings.provisional(values)
        config = _model_to_train(config, draft.per_process(processes), base)
        check_shards(shards, run_tokenizer, draft.max_seq_length)
        config = _set_chat_template(run_tokenizer, config, shards, base)
        values.setdefault("learning_rate", default_learning_rate(config, draft.optimizer, draft.parametrization))
        num_rows = count_rows(shards, draft)
        if not timed:
            one_epoch = -(-num_rows // draft.rows_per_step) if base and budget.tokens is None else None
            values["steps"] = budget.steps or one_epoch or steps_for(budget.tokens, config, draft)
        final, forecast = finalize_settings(config, values, shards, num_rows, budget, phase)
        if base is not None:
            return create_from_base(out, base, config, final, run_tokenizer, shards, not prepared, limited, forecast)
        run = Run.create(out, config, final, run_tokenizer, shards, move_data=not prepared)
    RunLog(run.log_file).record(limited, choice, forecast)
    return run


def merge_budget(
    budget: Budget | None, minutes: float | None, settings: Mapping[str, Any] | None
) -> tuple[Budget, dict[str, Any]]:
    """Return one budget, and complete settings: dtype, steps, accumulation of all processes, path of the teacher."""
    values, budget = dict(settings or {}), budget or Budget()
    minutes, steps = budget.minutes if minutes is None else minutes, values.get("steps")
    budget = replace(budget, minutes=minutes, steps=budget.steps if steps is None else steps)
    if budget.steps is not None:
        values["steps"] = budget.steps
    accumulation = values.get("grad_accumulation_steps", TrainSettings.grad_accumulation_steps)
    values["grad_accumulation_steps"] = accumulation * budget.num_processes
    set_default_dtype(values)
    if (teacher := values.get("teacher")) is not None:  # a run may be resumed in another folder
        values["teacher"] = str(Path(teacher).resolve()) if Path(teacher).exists() else teacher
    return budget, values


def set_default_dtype(values: dict[str, Any]) -> None:
    """Set the dtype of the settings `values`, if they have none. Raises ConfigError for one that is slow here."""
    values.setdefault("dtype", DEVICE_DTYPE)
    if ON_CPU and values["dtype"] != "float32":
        hint = "float32, the default on a CPU"
        raise ConfigError(f"a CPU computes {values['dtype']} products many times slower than float32", hint)


def _choose_model(
    config: ModelConfig | None,
    values: dict[str, Any],
    shards: Path,
    tokenizer: Tokenizer,
    budget: Budget,
    token_seconds: float | None,
    phase: Phase,
) -> tuple[ModelConfig, dict[str, Any], ModelSizeChosen | None]:
    """Return the model for `tokenizer`, the settings with a batch size and a sequence length, and the choice if any."""
    choice = None
    seconds, processes, fits_batch = budget.compute_seconds_left(), budget.num_processes, "batch_size" not in values
    if config is None:
        with phase("choosing a model", None):
            tokens, law = Manifest.read(shards).train.tokens, budget.scaling_law
            config, values, choice = auto_size(seconds, tokens, tokenizer.vocab_size, values, law, processes)
        config = with_tokenizer(config, tokenizer)
    elif token_seconds is not None:
        values = batch_settings(config, TRAINING_FRACTION * seconds / token_seconds, values)
    if budget.minutes is not None and fits_batch:  # large enough to use all cores, small enough for the memory
        if values["batch_size"] < platform.cpu_cores():
            with phase(MEASURING_LABEL, None):
                values["batch_size"] = max(values["batch_size"], min_rows(config, values))
        draft = TrainSettings.provisional(values).per_process(processes)
        while values["batch_size"] > 1 and not fits_memory(config, replace(draft, batch_size=values["batch_size"])):
            values["batch_size"] //= 2
    return config, values, choice


def _set_chat_template(tokenizer: Tokenizer, config: ModelConfig, shards: Path, base: Checkpoint | None) -> ModelConfig:
    """Give the tokenizer CHAT_TEMPLATE if the text has conversations, and return the model with its EOS tokens.

    Raises:
        DataError: The text has conversations, and `base` has another chat template.
    """
    has_conversations = Manifest.read(shards).num_conversations > 0
    if base is not None and tokenizer.chat_template is not None:
        if has_conversations and tokenizer.chat_template != CHAT_TEMPLATE:
            raise DataError(f"the text has conversations, which {base.path} formats in another way", "mlxlm finetune")
        return config
    tokenizer.chat_template = None  # without conversations in the text the model knows no roles: it continues text
    if has_conversations:
        tokenizer.chat_template = CHAT_TEMPLATE
        # An answer ends with the end of its turn, a text with the end of its document.
        config = config.with_changes(eos_token_id=[tokenizer.eos_token_id, tokenizer.special_tokens["<|end|>"]])
    return config


def with_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration with the vocabulary size and the special tokens of `tokenizer`."""
    return config.with_changes(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _model_to_train(config: ModelConfig, settings: TrainSettings, base: Checkpoint | None) -> ModelConfig:
    """Return the configuration to train, without `base` with a context of the sequence length, and not quantized.

    Raises:
        ConfigError: It can't be trained here.
    """
    context = settings.max_seq_length if base is None else config.max_position_embeddings
    config = config.with_changes(max_position_embeddings=context, quantization=None)
    check_trainable(config, settings, preset="--preset" if base is None else "")
    return config


def check_trainable(config: ModelConfig, settings: TrainSettings, preset: str = "--preset") -> None:
    """Raise ConfigError if µP has no rule for the model, or the machine lacks the memory to train it."""
    if settings.parametrization == "mup":
        check_mup(config, settings.optimizer)
    check_memory(config, settings, preset=preset)


def count_rows(shards: Path, settings: TrainSettings) -> int:
    """Return the rows of an epoch."""
    return open_batches(shards, replace(settings, batch_size=1, grad_accumulation_steps=1)).rows  # no padding


def finalize_settings(
    config: ModelConfig, values: dict[str, Any], shards: Path, num_rows: int, budget: Budget, phase: Phase
) -> tuple[TrainSettings, Forecast | None]:
    """Return the settings of the run, and a forecast if the run is long enough to benchmark it first.

    `values` have the steps, unless the budget has minutes; `num_rows` are the rows of an epoch.

    Raises:
        DataError: There is nothing to validate on.
    """
    settings = TrainSettings.provisional(values)
    validation_data = open_validation(shards, settings)
    if not validation_data.bytes or (settings.mask_prompt and not validation_data.num_targets()):
        kind = "answer" if settings.mask_prompt else "text"
        hint = f"more {kind}s, `validation=FILE`, or a larger `validation_fraction`"
        raise DataError(f"no {kind} is held out for validation", hint)
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
    total = TOKENS_PER_PARAMETER * config.active_parameter_count() if tokens is None else tokens
    return max(1, -(-int(total) // settings.tokens_per_step))


def as_data_options(data: DataOptions | Sequence[str | Path]) -> DataOptions:
    """Return `data` as DataOptions; paths are the sources."""
    return data if isinstance(data, DataOptions) else DataOptions(data)


def as_tokenizer_options(tokenizer: TokenizerOptions | str | Path | None) -> TokenizerOptions:
    """Return `tokenizer` as TokenizerOptions."""
    return tokenizer if isinstance(tokenizer, TokenizerOptions) else TokenizerOptions(tokenizer)


def check_sources(data: DataOptions, tokenizer: TokenizerOptions) -> Path | None:
    """Return the folder of prepared data, or None for text. Raises DataError for options that contradict it."""
    prepared = prepared_source(data.sources)
    if prepared and data.validation:
        raise DataError(f"{prepared} is prepared already, with its own validation part", "mlxlm prepare --validation")
    if prepared and data.weights:
        raise DataError(f"{prepared} is prepared already, with its own weights", "mlxlm prepare PATH=WEIGHT ...")
    if (stream := unseekable_source(data.sources)) is not None and tokenizer.path is None:
        hint = "a file, or mlxlm pretrain --tokenizer PATH"
        raise DataError(f"{stream} can be read only once, so it can't train a tokenizer too", hint)
    return prepared


def existing_tokenizer(options: TokenizerOptions, prepared: Path | None) -> Tokenizer | None:
    """Load the tokenizer at `options.path` or of the prepared data; None if one has to be trained."""
    if options.path is not None:
        return open_tokenizer(options.path)
    return load(prepared / "tokenizer") if prepared else None


def train_tokenizer(
    data: DataOptions, options: TokenizerOptions, vocab_size: int, seed: int, phase: Phase = no_phase
) -> Tokenizer:
    """Train a tokenizer on the text that `prepare` trains on, without what it holds out for validation.

    `vocab_size` is reduced if the text doesn't support it, unless `options.vocab_size` asks for it.
    """
    label = f"training a {options.tokenizer_type} tokenizer of {vocab_size} tokens"
    with phase(label, num_bytes(data, data.sources)) as advance:
        texts = training_texts(data, seed=seed, progress=advance)
        return train(texts, vocab_size, options.tokenizer_type, exact=options.vocab_size is not None)


def limit_text(
    data: DataOptions, seconds: float, prepare_sample: Callable[[DataOptions, Path], Any], phase: Phase = no_phase
) -> tuple[DataOptions, TextLimited | None]:
    """Return `data` with as much of its text as can be prepared in a part of `seconds`, and an event if that isn't all.

    Args:
        data: The text.
        seconds: Until the end of the run.
        prepare_sample: Prepares a sample of the text in a new folder, as all of it would be.
        phase: See `start_run`.
    """
    total = None if unseekable_source(data.sources) else total_bytes([*data.sources, *data.validation])
    if total is None or total <= max(_SAMPLE_BYTES, _MIN_BYTES_PER_SECOND * seconds):
        return data, None
    sample = _SAMPLE_BYTES / total
    with phase("measuring the speed of preparing text", None), TemporaryDirectory() as folder:
        start = time.monotonic()
        prepare_sample(replace(data, fraction=sample), Path(folder, "data"))
        sample_seconds = time.monotonic() - start
    fraction = max(sample, sample * PREPARATION_FRACTION * seconds / sample_seconds)
    if fraction >= 1:
        return data, None
    return replace(data, fraction=fraction), TextLimited(round(fraction * total), total)


def num_bytes(data: DataOptions, paths: Sequence[str | Path]) -> int | None:
    """Return the bytes of `paths` that are read; None if stdin is among them."""
    total = total_bytes(paths)
    return None if total is None else round(data.fraction * total)


def prepare_shards(
    data: DataOptions, tokenizer: Tokenizer, out: Path, seed: int, phase: Phase = no_phase, encode: Encode | None = None
) -> Path:
    """Tokenize the text into the folder `out`, and return `out`. See `prepare`."""
    with phase("preparing tokens", num_bytes(data, [*data.sources, *data.validation])) as advance:
        prepare(data, tokenizer, out, seed=seed, encode=encode, progress=advance)
    return out


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, data: Path) -> None:
    """Raise DataError if the shards in `data` were made with another tokenizer."""
    if manifest.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{data} was prepared with another tokenizer", "the one it was prepared with")


def check_shards(data: Path, tokenizer: Tokenizer, max_seq_length: int) -> None:
    """Raise DataError if the shards in `data` were made with another tokenizer, or have too few tokens."""
    manifest = Manifest.read(data)
    check_tokenizer(manifest, tokenizer, data)
    if (tokens := manifest.train.tokens) < max_seq_length + 1:
        hint = f"`max_seq_length={tokens - 1}`, or more text" if tokens > 2 else "more text"
        raise TooFewTokensError(f"the text has {tokens} tokens, less than one sequence of {max_seq_length}", hint)
