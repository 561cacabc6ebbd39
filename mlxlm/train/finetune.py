"""From a model and conversations to a run that fine-tunes all its parameters on the assistant's messages."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxlm.checkpoint import Checkpoint
from mlxlm.config import ModelConfig
from mlxlm.data import BadInput, Chunk, DataOptions, Document
from mlxlm.data.preparation import read_sources
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.base_model import LR_FRACTION, create_from_base, load_base, set_base_defaults
from mlxlm.train.budget import MEASURING_LABEL, Budget, seconds_per_token
from mlxlm.train.distillation import check_teacher
from mlxlm.train.events import Conversations
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.preferences import PreferenceEncoder, compute_reference_logps
from mlxlm.train.run import Run
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
from mlxlm.utils.errors import CheckpointError, DataError
from mlxlm.utils.files import check_not_exists, working_folder

DEFAULT_EPOCHS = 3.0  # as for Alpaca; the chat models of Llama 2 had 2. The best checkpoint is the one to chat with
PREFERENCE_EPOCHS = {"dpo": 1.0, "kto": 1.0}  # as Zephyr and TRL's examples; ORPO learns the answers, too
FINETUNE_SETTINGS = {"packing": "best-fit", "document_mask": True, "mask_prompt": True}  # of every fine-tuning run
_MIN_STEPS_PER_EPOCH = 8  # fewer and larger steps learn little from few conversations
_MIN_STEPS = 200  # with a time limit, if a batch size of one row allows them
_ORPO_LR_FRACTION = 0.08  # 1e-5 for 7B; the paper has 8e-6


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
        if document.label is False:
            raise DataError(f"{document.location} has an answer with the label false", "`loss=kto`, to avoid it")
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
        data: Paths of JSON lines with "messages"; with the setting `loss` "dpo", "orpo" or "kto" those of
            preferences, see `PreferenceEncoder`; or DataOptions.
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
    loss = values.get("loss", TrainSettings.loss)
    draft = set_base_defaults(values, config, _lr_fraction(loss, config))
    check_teacher(values, tokenizer, config.vocab_size)
    check_memory(config, replace(draft, batch_size=draft.batch_size * (2 if draft.has_pairs else 1)), preset="")
    with working_folder(out) as workspace:
        rows, limited = _row_encoder(encoder, draft), None
        if budget.minutes is not None:

            def prepare_sample(sample: DataOptions, folder: Path) -> None:
                prepare_shards(sample, tokenizer, folder, draft.seed, encode=_row_encoder(encoder, draft))

            data, limited = limit_text(data, budget.seconds_left(), prepare_sample, phase)
        shards = prepare_shards(data, tokenizer, workspace / "data", draft.seed, phase, rows)
        if loss in ("dpo", "kto"):
            with phase("computing reference log-probabilities", None):
                compute_reference_logps(load_base(base, config, draft.dtype), shards, draft)
        num_rows = count_rows(shards, draft)
        values.setdefault("batch_size", _default_batch_size(config, values, num_rows, budget, phase))
        if budget.minutes is None:
            epochs = budget.epochs or PREFERENCE_EPOCHS.get(loss, DEFAULT_EPOCHS)
            rows_per_step = TrainSettings.provisional(values).rows_per_step
            values["steps"] = budget.steps or max(1, math.ceil(epochs * num_rows / rows_per_step))
            values.setdefault("eval_every", max(1, values["steps"] // 10))
        final_settings, forecast = finalize_settings(config, values, shards, num_rows, budget, phase)
        tokenizer.chat_template = encoder.chat_template
        event = rows.event(config.max_position_embeddings)
        return create_from_base(out, base, config, final_settings, tokenizer, shards, True, event, limited, forecast)


def first_rows(
    base: Checkpoint,
    encoder: ConversationEncoder,
    data: DataOptions,
    count: int,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Document, Chunk]]:
    """Yield the first `count` documents that `start_finetune` packs into rows, each with what it was read from.

    Only as much of the data is read as they need. For the arguments and errors see `start_finetune`.
    """
    encode = _row_encoder(encoder, set_base_defaults({**(settings or {})}, base.config))
    on_bad = BadInput(data.on_bad_input)
    documents = read_sources(data, data.sources, on_bad, check=lambda _document: None)
    return itertools.islice(((d, piece) for d in documents for piece in _encoded(encode, d, on_bad)), count)


def _row_encoder(encoder: ConversationEncoder, settings: TrainSettings) -> RowEncoder | PreferenceEncoder:
    length = settings.max_seq_length
    return PreferenceEncoder(encoder, settings.loss, length) if settings.has_pairs else RowEncoder(encoder, length)


def _encoded(encode: RowEncoder | PreferenceEncoder, document: Document, on_bad: BadInput) -> list[Chunk]:
    try:
        return encode(document)
    except DataError as error:
        on_bad(error)
        return []


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
        batch_size = min(batch_size, int(tokens / _MIN_STEPS / (settings.tokens_per_step / settings.batch_size)))
    return max(1, batch_size)


def _lr_fraction(loss: str, config: ModelConfig) -> float:
    """Return the default learning rate as a fraction of that of pretraining.

    For DPO and KTO it runs through 1e-6 for 7B parameters, as in TRL and between those of the papers, and 3e-4 for
    2.7M: there 16 steps of DPO with 3e-4 reached a margin of 2 on validation pairs and halved the length of stories,
    and 9 steps with 3e-5 on other pairs changed nothing (`benchmarks/preferences.py`).
    """
    if loss in ("dpo", "kto"):
        return min(LR_FRACTION, 0.008 * (config.active_parameter_count() / 7e9) ** -0.33)
    return _ORPO_LR_FRACTION if loss == "orpo" else LR_FRACTION
