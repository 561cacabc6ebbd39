"""From a model and conversations to a run that fine-tunes all its parameters on the assistant's messages."""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.chat.chat_template import CHAT_FORMATS
from mlxlm.checkpoint import Checkpoint, load_float32_weights, open_decoder_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.data import BadInput, Chunk, DataOptions, Document
from mlxlm.data.preparation import read_sources
from mlxlm.generation import GenerationConfig
from mlxlm.generation.loaded_model import read_generation_config
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.budget import MEASURING_LABEL, Budget, seconds_per_token
from mlxlm.train.events import Conversations, RunLog
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.optimizers import default_learning_rate
from mlxlm.train.run import Run, TrainState
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import (
    Phase,
    as_data_options,
    count_rows,
    finalize_settings,
    limit_text,
    merge_budget,
    no_phase,
    prepare_shards,
)
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import atomic_new_folder, check_not_exists, working_folder

DEFAULT_EPOCHS = 3.0  # as for Alpaca; the chat models of Llama 2 had 2. The best checkpoint is the one to chat with
DEFAULT_SEQ_LENGTH = 512
FINETUNE_SETTINGS = {"packing": "best-fit", "document_mask": True, "mask_prompt": True}  # of every fine-tuning run
_MIN_STEPS_PER_EPOCH = 8  # fewer and larger steps learn little from few conversations
_MIN_STEPS = 200  # with a time limit, if a batch size of one row allows them
# Fraction of the peak rate of pretraining: 2.5e-5 for 7B parameters, where Alpaca and the chat models of Llama 2 had
# 2e-5. A model of 0.3M reached 2.254, 2.238 and 2.256 nats with 0.1, 0.2 and 0.6 of it, with the last after forgetting
# 0.12 first.
_LR_FRACTION = 0.2


class ConversationEncoder(Protocol):
    """Encodes conversations by a chat template.

    Attributes:
        chat_template: The jinja template with which to chat with the model.
        eos_token_ids: The tokens that end an answer.
    """

    chat_template: str
    eos_token_ids: frozenset[int]

    def __call__(self, document: Document, max_tokens: int) -> Iterable[Chunk]:
        """Return a conversation with a loss mask, in chunks of at most `max_tokens` if it can be split."""
        ...


class RowEncoder:
    """Encodes conversations for `prepare`, as documents that fit into rows of `length` targets.

    A question with its answer that is longer than a row becomes several documents. Each begins with as many tokens of
    context as half a row has, and continues where the answers of the one before ended. So every token of an answer is
    learned, in exactly one of them.

    Attributes:
        conversations: Number of conversations.
        pieces: Number of documents made of them.
        split: Conversations that became several documents between turns only.
        cut: Conversations that have a question with an answer which is longer than a row.
        tokens: Tokens of the documents.
        learned_tokens: Those that are learned.
        needed_length: The sequence length that the longest question with its answer needs.
    """

    def __init__(self, encoder: ConversationEncoder, length: int):
        self._encoder, self._room = encoder, length + 1
        self.conversations = self.pieces = self.split = self.cut = self.needed_length = 0
        self.tokens = self.learned_tokens = 0

    def __call__(self, document: Document) -> list[Chunk]:
        """Return the documents of a conversation."""
        exchanges = list(self._encoder(document, self._room))
        pieces = [piece for chunk in exchanges for piece in _windows(chunk, self._room)]
        needed = max(int(np.flatnonzero(_loss_mask(chunk))[-1]) for chunk in exchanges)
        self.conversations += 1
        self.pieces += len(pieces)
        self.tokens += sum(len(piece.ids) for piece in pieces)
        self.learned_tokens += sum(int(_loss_mask(piece).sum()) for piece in pieces)
        self.needed_length = max(self.needed_length, needed)
        if needed >= self._room:
            self.cut += 1
        elif len(exchanges) > 1:
            self.split += 1
        return pieces

    def event(self, context_length: int) -> Conversations:
        """Return the event for the log, which suggests a sequence length of at most `context_length`."""
        suggested = min(64 * -(-self.needed_length // 64), context_length)
        helps = self.needed_length >= self._room and suggested >= self._room
        counts = self.conversations, self.pieces, self.split, self.cut, self.tokens, self.learned_tokens
        return Conversations(*counts, self._room - 1, suggested if helps else None)


def _loss_mask(chunk: Chunk) -> np.ndarray:
    return np.ones(len(chunk.ids), np.uint8) if chunk.loss_mask is None else chunk.loss_mask


def _windows(chunk: Chunk, room: int) -> Iterator[Chunk]:
    """Yield a document as one or more of at most `room` tokens; each learned token is learned in one of them."""
    whole_mask, stop, text_bytes = _loss_mask(chunk), 0, chunk.text_bytes
    learned = np.flatnonzero(whole_mask)
    while len(learned := learned[learned >= stop]):
        start = 0
        if learned[0] >= room or stop:
            start = min(int(learned[0]) - room // 2, max(0, int(learned[-1]) + 1 - room))
        loss_mask = whole_mask[start : start + room].copy()
        loss_mask[: max(0, stop - start)] = 0
        yield Chunk(chunk.ids[start : start + room], text_bytes, True, loss_mask)
        stop, text_bytes = start + room, 0


def start_finetune(
    out: Path | str,
    base: Checkpoint,
    tokenizer: Tokenizer,
    encoder: ConversationEncoder,
    data: DataOptions | Sequence[str | Path],
    *,
    budget: Budget | None = None,
    settings: Mapping[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run directory `out`, ready for `train(run, tokenizer, resume=True)`.

    Conversations are packed by best fit. Attention stays within a conversation, and the tokens that `encoder` marks are
    learned. Longer conversations than a row are split before questions. If a question with its answer is longer than a
    row, it continues in the next row after half a row of context, so that every answer is learned to its end; the run's
    log says how often (`Conversations`).

    The run has the sampling options of the base model's generation_config.json, and begins with a checkpoint of step 0,
    the model in float32. Training resumes from there, and first validates it.

    Args:
        out: The new folder.
        base: The model, of `open_base_model`.
        tokenizer: Its tokenizer, of `open_base_model`.
        encoder: Encodes conversations by a chat template.
        data: Paths of JSON lines with "messages"; or DataOptions.
        budget: How long to train, unless `settings` have "steps". Default: 3 epochs.
        settings: Fields of `TrainSettings`, except those of FINETUNE_SETTINGS. The learning rate defaults to a fifth of
            that of pretraining. The batch size defaults to 16, less if an epoch would have fewer than 8 steps or the
            time allows fewer than 200. Validation defaults to 10 times.
        phase: See `start_run`.

    Raises:
        CheckpointError: `out` exists.
        DataError, ConfigError: For what can't work.
    """
    out = Path(out)
    check_not_exists(out, CheckpointError, f"mlxlm finetune --resume {shlex.quote(str(out))}, or another `out`")
    data = as_data_options(data)
    budget, values = merge_budget(budget, None, {**(settings or {}), **FINETUNE_SETTINGS})
    config = _config_to_tune(base.config, encoder)
    values.setdefault("max_seq_length", _default_seq_length(config))
    peak = default_learning_rate(config, values.get("optimizer", TrainSettings.optimizer))
    values.setdefault("learning_rate", _LR_FRACTION * peak)
    draft = TrainSettings.provisional(values)
    if draft.max_seq_length > config.max_position_embeddings:
        problem = f"sequences of {draft.max_seq_length} tokens are longer than the model's context"
        raise ConfigError(problem, f"`max_seq_length={config.max_position_embeddings}` or less")
    check_memory(config, draft, preset="")
    with working_folder(out) as workspace:
        rows, limited = RowEncoder(encoder, draft.max_seq_length), None
        if budget.minutes is not None:

            def prepare_sample(sample: DataOptions, folder: Path) -> None:
                prepare_shards(sample, tokenizer, folder, draft.seed, encode=RowEncoder(encoder, draft.max_seq_length))

            data, limited = limit_text(data, budget.seconds_left(), prepare_sample, phase)
        shards = prepare_shards(data, tokenizer, workspace / "data", draft.seed, phase, rows)
        num_rows = count_rows(shards, draft)
        values.setdefault("batch_size", _default_batch_size(config, values, num_rows, budget, phase))
        if budget.minutes is None:
            epochs, rows_per_step = budget.epochs or DEFAULT_EPOCHS, TrainSettings.provisional(values).rows_per_step
            values["steps"] = budget.steps or max(1, math.ceil(epochs * num_rows / rows_per_step))
            values.setdefault("eval_every", max(1, values["steps"] // 10))
        final_settings, forecast = finalize_settings(config, values, shards, num_rows, budget, phase)
        tokenizer.chat_template = encoder.chat_template
        saving_since = time.monotonic()
        with atomic_new_folder(out) as folder:
            run = Run.create(folder, config, final_settings, tokenizer, shards, move_data=True)
            _save_base(run, base)
            if options := read_generation_config(base, str(base.path)).options:
                GenerationConfig(options).write(folder)
            run.update_state(0, {"elapsed": time.monotonic() - saving_since})  # it counts in the time limit
            RunLog(run.log_file).record(rows.event(config.max_position_embeddings), limited, forecast)
        return Run.open(out)


def first_rows(
    base: Checkpoint,
    encoder: ConversationEncoder,
    data: DataOptions,
    count: int,
    max_seq_length: int | None = None,
) -> Iterator[tuple[Document, Chunk]]:
    """Yield the first `count` conversations that `start_finetune` packs, or parts of them that fit a row.

    Only as much of the data is read as they need. For the arguments and errors see `start_finetune`.
    """
    encode, on_bad = (
        RowEncoder(encoder, max_seq_length or _default_seq_length(base.config)),
        BadInput(data.on_bad_input),
    )
    documents = read_sources(data, data.sources, on_bad, check=lambda _document: None)
    return itertools.islice(((d, piece) for d in documents for piece in _encoded(encode, d, on_bad)), count)


def _encoded(encode: RowEncoder, document: Document, on_bad: BadInput) -> list[Chunk]:
    try:
        return encode(document)
    except DataError as error:
        on_bad(error)
        return []


def _default_seq_length(config: ModelConfig) -> int:
    return min(DEFAULT_SEQ_LENGTH, config.max_position_embeddings)


def open_base_model(model: Path | str) -> tuple[Checkpoint, Tokenizer]:
    """Open a model to fine-tune, and its tokenizer; `model`: see `open_checkpoint`.

    Raises:
        CheckpointError: As `open_decoder_checkpoint`; or the tokenizer has more tokens than the model.
    """
    base = open_decoder_checkpoint(model, "fine-tuned")
    tokenizer = base.load_tokenizer()
    chat_tokens = {token for chat in CHAT_FORMATS.values() if chat.has_tokens(tokenizer) for token in chat.tokens}
    needed = max(tokenizer.min_vocab_size, *(tokenizer.special_tokens[token] + 1 for token in chat_tokens), 0)
    if needed > base.config.vocab_size:
        problem = f"{base.path}: the tokenizer has {needed} tokens and the model {base.config.vocab_size}"
        raise CheckpointError(problem, "the tokenizer files that belong to these weights")
    return base, tokenizer


def _config_to_tune(config: ModelConfig, encoder: ConversationEncoder) -> ModelConfig:
    """Return the configuration of the tuned model: not quantized, with the tokens that end an answer as EOS."""
    eos = config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
    eos_ids = [*eos_ids, *sorted(encoder.eos_token_ids - config.eos_token_ids)]
    return config.with_changes(quantization=None, eos_token_id=eos_ids[0] if len(eos_ids) == 1 else eos_ids)


def _default_batch_size(
    config: ModelConfig, values: Mapping[str, Any], num_rows: int, budget: Budget, phase: Phase
) -> int:
    """Return the batch size with which an epoch, and the time, have enough steps.

    Raises:
        ConfigError: With these settings, the time is too short.
    """
    settings = TrainSettings.provisional(values)
    accumulation = settings.grad_accumulation_steps
    batch_size = min(TrainSettings.batch_size, num_rows // (accumulation * _MIN_STEPS_PER_EPOCH))
    if budget.minutes is not None:
        with phase(MEASURING_LABEL, None):
            seconds = budget.compute_seconds_left()
            tokens = seconds / seconds_per_token(config, seconds, values, finetuning=True)
        batch_size = min(batch_size, int(tokens / _MIN_STEPS / (settings.max_seq_length * accumulation)))
    return max(1, batch_size)


def _save_base(run: Run, base: Checkpoint) -> None:
    """Save the base model as the checkpoint of step 0, not validated yet."""
    model = Decoder(run.config)
    model.load_weights(list(load_float32_weights(base).items()))
    mx.random.seed(run.settings.seed)
    step = TrainStep(model, run.settings)
    mx.eval(step.state)
    run.save_checkpoint(step, TrainState())
