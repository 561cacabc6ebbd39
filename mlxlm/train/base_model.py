"""The model that a run starts from, instead of random weights: for fine-tuning and further pretraining."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import free_memory, mx
from mlxlm.chat.chat_template import CHAT_FORMATS
from mlxlm.checkpoint import Checkpoint, load_float32_weights, open_decoder_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.generation import GenerationConfig
from mlxlm.generation.loaded_model import read_generation_config
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.events import Event, Initialized, RunLog
from mlxlm.train.optimizers import default_learning_rate
from mlxlm.train.run import Run, TrainState
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_folder

DEFAULT_SEQ_LENGTH = 512
# Fraction of the peak rate of pretraining: 2.5e-5 for 7B parameters, where Alpaca and the chat models of Llama 2 had
# 2e-5. Fine-tuned, a model of 0.3M reached 2.254, 2.238 and 2.256 nats with 0.1, 0.2 and 0.6 of it, with the last after
# forgetting 0.12 first. Pretrained further on another text, it learns more with a higher rate and forgets more, see
# docs/train.md.
LR_FRACTION = 0.2


def open_base_model(model: Path | str, purpose: str = "fine-tuned") -> tuple[Checkpoint, Tokenizer]:
    """Open a model to train further, and its tokenizer.

    Args:
        model: See `open_checkpoint`.
        purpose: What it is for, in the error.

    Raises:
        CheckpointError: As `open_decoder_checkpoint`; or the tokenizer has more tokens than the model.
    """
    base = open_decoder_checkpoint(model, purpose)
    tokenizer = base.load_tokenizer()
    chat_tokens = {token for chat in CHAT_FORMATS.values() if chat.has_tokens(tokenizer) for token in chat.tokens}
    needed = max(tokenizer.min_vocab_size, *(tokenizer.special_tokens[token] + 1 for token in chat_tokens), 0)
    if needed > base.config.vocab_size:
        problem = f"{base.path}: the tokenizer has {needed} tokens and the model {base.config.vocab_size}"
        raise CheckpointError(problem, "the tokenizer files that belong to these weights")
    return base, tokenizer


def set_base_defaults(values: dict[str, Any], config: ModelConfig, lr_fraction: float = LR_FRACTION) -> TrainSettings:
    """Set the sequence length and the learning rate for training a model further, and return provisional settings.

    Args:
        values: Settings, changed in place.
        config: The model.
        lr_fraction: The default learning rate, as a fraction of that of a new model.

    Raises:
        ConfigError: The settings `values` can't work, or the sequences are longer than the model's context.
    """
    values.setdefault("max_seq_length", min(DEFAULT_SEQ_LENGTH, config.max_position_embeddings))
    peak = default_learning_rate(config, values.get("optimizer", TrainSettings.optimizer))
    values.setdefault("learning_rate", lr_fraction * peak)
    settings = TrainSettings.provisional(values)
    if settings.max_seq_length > config.max_position_embeddings:
        problem = f"sequences of {settings.max_seq_length} tokens are longer than the model's context"
        raise ConfigError(problem, f"`max_seq_length={config.max_position_embeddings}` or less")
    return settings


def load_base(base: Checkpoint, config: ModelConfig, dtype: str = "float32") -> Decoder:
    """Load the weights of `base`, dequantized, into a model of `config`, which must have the same shapes."""
    model = Decoder(config)
    model.load_weights(list(load_float32_weights(base).items()))
    model.set_dtype(getattr(mx, dtype))
    return model


def create_from_base(
    out: Path,
    base: Checkpoint,
    config: ModelConfig,
    settings: TrainSettings,
    tokenizer: Tokenizer,
    shards: Path,
    move_data: bool,
    *events: Event | None,
) -> Run:
    """Make the run `out`, which begins with a checkpoint of step 0, the model `base` in float32, not validated yet.

    It has the sampling options of the model's generation_config.json. Its log begins with `events` and names the model.
    """
    saving_since = time.monotonic()
    with atomic_new_folder(out) as folder:
        run = Run.create(folder, config, settings, tokenizer, shards, move_data)
        _save_base(run, base)
        free_memory()
        if options := read_generation_config(base, str(base.path)).options:
            GenerationConfig(options).write(folder)
        run.update_state(0, {"elapsed": time.monotonic() - saving_since})  # it counts in the time limit
        RunLog(run.log_file).record(*events, Initialized(str(base.path)))
    return Run.open(out)


def _save_base(run: Run, base: Checkpoint) -> None:
    """Save the model `base` as the checkpoint of step 0, not validated yet."""
    mx.random.seed(run.settings.seed)
    step = TrainStep(load_base(base, run.config), run.settings)
    mx.eval(step.state)
    run.save_checkpoint(step, TrainState())
