"""From a model and a person's conversations to a run that tunes it: all its parameters, on what it has to say."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.chat.chat_formats import CHAT_FORMATS
from mlxlm.checkpoint import Checkpoint, load_float32_weights, open_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.data import Chunk, DataOptions, Document, Manifest, TokenDataset, TrainBatches, prepare, total_bytes
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.events import Conversations
from mlxlm.train.log import RunLog
from mlxlm.train.optimizers import default_learning_rate, default_weight_decay
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.train.start import Phase, check_duration, check_memory, no_phase, set_default_dtype, time_left
from mlxlm.train.step import TrainStep
from mlxlm.train.step_benchmark import BENCHMARK_LABEL, MIN_STEPS_TO_BENCHMARK, Probe, probe
from mlxlm.train.time_budget import MEASURING_LABEL, seconds_per_token, validation_settings
from mlxlm.train.train_state import TrainState
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import atomic_new_folder, check_not_exists, working_folder

DEFAULT_EPOCHS = (
    3.0  # as for Alpaca; the chats of Llama 2 had 2. The checkpoint that validates best is what a chat loads
)
DEFAULT_SEQ_LENGTH = 512  # tokens of a row
_STEPS_PER_EPOCH = 8  # least: fewer and larger steps learn little from few conversations
_LEAST_STEPS = 200  # in a given time, where one row a step allows them
# Of the peak rate of pretraining: 2.5e-5 for 7B parameters, where Alpaca and Llama 2's chats took 2e-5. A model of
# 0.3M came to 2.254, 2.238 and 2.256 nats with 0.1, 0.2 and 0.6 of it, with the last after forgetting 0.12 first.
_RATE = 0.2

FINETUNE_SETTINGS = {"packing": "best-fit", "document_mask": True, "mask_prompt": True}  # of every tuning run


class ConversationEncoder(Protocol):
    """A form of conversation.

    chat_template: the jinja template that a chat with the model will use.
    eos_token_ids: the tokens that end an answer.
    """

    chat_template: str
    eos_token_ids: frozenset[int]

    def __call__(self, document: Document, room: int) -> Iterable[Chunk]:
        """The tokens of a conversation, in pieces of at most `room` where it can be cut, and which are learned."""
        ...


class _Encoder:
    """`turns` for `prepare`, as documents that fit a row of `length` targets.

    An exchange that is longer becomes several documents: each goes on where the answers of the one before ended, after
    as many tokens of context as half a row has. So every token of an answer is learned, in exactly one of them.

    Attributes:
        conversations, pieces: how many came, and how many documents were made of them.
        split, cut: of the conversations, those that became several documents between turns only, and those with an
            exchange that is longer than a row.
        needed: the sequence length that the longest exchange would take.
    """

    def __init__(self, turns: ConversationEncoder, length: int):
        self._turns, self._room = turns, length + 1
        self.conversations = self.pieces = self.split = self.cut = self.needed = 0

    def __call__(self, document: Document) -> list[Chunk]:
        exchanges = list(self._turns(document, self._room))
        pieces = [piece for chunk in exchanges for piece in _windows(chunk, self._room)]
        needed = max(int(np.flatnonzero(chunk.loss_mask)[-1]) for chunk in exchanges)
        self.conversations += 1
        self.pieces += len(pieces)
        self.needed = max(self.needed, needed)
        if needed >= self._room:
            self.cut += 1
        elif len(exchanges) > 1:
            self.split += 1
        return pieces

    def suggested_seq_length(self, context: int) -> int | None:
        """A sequence length within `context` that more of the exchanges fit into; None where there is none."""
        length = min(64 * -(-self.needed // 64), context)
        return length if self.needed >= self._room and length >= self._room else None


def _windows(chunk: Chunk, room: int) -> Iterator[Chunk]:
    """A document as one or more of at most `room` tokens; each token to be learned is to be learned in one of them."""
    places = np.flatnonzero(chunk.loss_mask)
    stop, text_bytes = 0, chunk.text_bytes
    while len(places := places[places >= stop]):
        start = 0
        if places[0] >= room or stop:
            start = min(int(places[0]) - room // 2, max(0, int(places[-1]) + 1 - room))
        loss_mask = chunk.loss_mask[start : start + room].copy()
        loss_mask[: max(0, stop - start)] = 0
        yield Chunk(chunk.ids[start : start + room], text_bytes, True, loss_mask)
        stop, text_bytes = start + room, 0


def start_finetune(
    out: Path | str,
    base: Checkpoint,
    tokenizer: Tokenizer,
    turns: ConversationEncoder,
    sources: Sequence[str | Path],
    *,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.05,
    on_bad_input: str = "stop",
    epochs: float | None = None,
    minutes: float | None = None,
    duty_cycle: float = 100.0,
    start_time: float | None = None,
    settings: dict[str, Any] | None = None,
    stdin: IO[bytes] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run `out` that tunes the model `base` on `sources`: JSON lines with "messages".

    Conversations are packed by best fit, each seeing itself only, and of them what `turns` says is learned. One that
    fits a row is whole in one; longer ones are cut in front of questions. A question with its answer that is longer
    still goes on in further rows, where half a row of what came before is read again, so that every answer is learned
    to its end. The run's log says how many these are (`Conversations`). The run begins with a checkpoint at step 0, the
    model in float32, so that it is continued from there, as it would be from any other: `train(run, tokenizer,
    resume=True)`, which first validates the model as it came.

    base, tokenizer: of `open_base_model`.
    epochs, minutes: how long to train, instead of `settings["steps"]`; by default EPOCHS. Minutes, `duty_cycle` and `start_time`
        are as in `start_run`.
    settings: fields of TrainSettings but for FORM. By default the learning rate is a fifth of the peak of
        pretraining, a batch has 16 rows, fewer where an epoch would have less than 8 steps or the time allows less than
        200, and validation is 10 times.
    validation, validation_fraction, on_bad_input, phase: see `start_run`.

    Raises CheckpointError if `out` exists, and DataError or ConfigError for what can't work.
    """
    start_time, out = time.monotonic() if start_time is None else start_time, Path(out)
    check_not_exists(out, CheckpointError, f"mlxlm finetune --resume {shlex.quote(str(out))}, or another --out")
    values = {**(settings or {}), **FINETUNE_SETTINGS}
    check_duration(epochs=epochs, minutes=minutes, steps=values.get("steps"))
    config = _tuned(base.config, turns)
    set_default_dtype(values)
    values.setdefault("max_seq_length", min(DEFAULT_SEQ_LENGTH, config.max_position_embeddings))
    peak = default_learning_rate(config, values.get("optimizer", TrainSettings.optimizer))
    values.setdefault("learning_rate", _RATE * peak)
    provisional = TrainSettings.provisional(values)
    if provisional.max_seq_length > config.max_position_embeddings:
        problem = f"sequences of {provisional.max_seq_length} tokens are longer than the model's context"
        raise ConfigError(problem, f"--max-seq-length {config.max_position_embeddings} or less")
    check_memory(config, provisional, preset="")
    workspace = working_folder(out)
    try:
        data = workspace / "data"
        encoder, context = _Encoder(turns, provisional.max_seq_length), config.max_position_embeddings
        with phase("preparing conversations", total_bytes([*sources, *validation])) as advance:
            prepare(
                DataOptions(
                    sources,
                    validation=validation,
                    validation_fraction=validation_fraction,
                    on_bad_input=on_bad_input,
                    stdin=stdin,
                ),
                tokenizer,
                data,
                seed=provisional.seed,
                encode=encoder,
                progress=advance,
            )
        if not Manifest.read(data).validation.documents:
            hint = "more conversations, or --validation FILE" if validation_fraction else "--validation-fraction 0.05"
            raise DataError("no conversation is held out for validation", hint)
        found = _lengths(values, provisional, config, data, epochs, minutes, start_time, duty_cycle, phase)
        final = TrainSettings(**values)
        tokenizer.chat_template = turns.chat_template
        limited = time.monotonic()
        with atomic_new_folder(out) as folder:
            run = Run.create(folder, config, final, tokenizer, data, move_data=True)
            _save_base(run, base)
            run.update_state(0, {"elapsed": time.monotonic() - limited})  # of the time there is: the run begins with it
            log = RunLog(run.log_file)
            log.record(
                Conversations(
                    encoder.conversations, encoder.pieces, encoder.split, encoder.cut, provisional.max_seq_length,
                    encoder.suggested_seq_length(context),
                )
            )  # fmt: skip
            if found is not None:
                log.record(found.forecast(final, Manifest.read(run.data).validation.tokens))
        return Run.open(out)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def open_base_model(model: Path | str) -> tuple[Checkpoint, Tokenizer]:
    """A model to be tuned, and its tokenizer; `model`: see `open_checkpoint`.

    Raises CheckpointError, besides what `open_checkpoint` does, for an architecture that mlxlm leaves to mlx_lm, and
    for a tokenizer with more tokens than the model has.
    """
    base = open_checkpoint(model)
    if base.config is None:
        raise CheckpointError(f"{base.path} can't be trained: {base.unsupported_reason}", "a model of another family")
    tokenizer = base.load_tokenizer()
    marks = {token for known in CHAT_FORMATS.values() if known.has_tokens(tokenizer) for token in known.tokens}
    needed = max(tokenizer.min_vocab_size, *(tokenizer.special_tokens[token] + 1 for token in marks), 0)
    if needed > base.config.vocab_size:
        raise CheckpointError(
            f"{base.path}: the tokenizer has {needed} tokens and the model {base.config.vocab_size}",
            "the tokenizer files that belong to these weights",
        )
    return base, tokenizer


def _tuned(config: ModelConfig, turns: ConversationEncoder) -> ModelConfig:
    """The configuration of the tuned model: without quantization, its texts ending where an answer ends."""
    eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    ends = [*ends, *sorted(turns.eos_token_ids - config.eos_ids)]
    return config.with_changes(quantization=None, eos_token_id=ends[0] if len(ends) == 1 else ends)


def _lengths(
    values: dict[str, Any],
    provisional: TrainSettings,
    config: ModelConfig,
    data: Path,
    epochs: float | None,
    minutes: float | None,
    start_time: float,
    duty_cycle: float,
    phase: Phase,
) -> Probe | None:
    """Fill in what the size of the data decides: rows of a batch, steps, and steps between validations. Returns what
    a probe found, if there was one."""
    train = TokenDataset.open(data, "train")
    rows = TrainBatches(train, 1, provisional.max_seq_length, provisional.seed, **FINETUNE_SETTINGS).rows
    each = provisional.grad_accumulation_steps * _STEPS_PER_EPOCH
    most = max(1, min(TrainSettings.batch_size, rows // each))
    if minutes is not None:
        with phase(MEASURING_LABEL, None):
            available = time_left(minutes, start_time) * duty_cycle / 100
            tokens = available / seconds_per_token(config, available, values, finetuning=True)
        most = max(
            1,
            min(most, int(tokens / _LEAST_STEPS / (provisional.max_seq_length * provisional.grad_accumulation_steps))),
        )
    values.setdefault("batch_size", most)
    provisional = TrainSettings.provisional(values)
    found = None
    if minutes is None and "steps" not in values:
        values["steps"] = max(
            1,
            math.ceil(
                (epochs or DEFAULT_EPOCHS) * rows / (provisional.batch_size * provisional.grad_accumulation_steps)
            ),
        )
    if minutes is not None or values["steps"] >= MIN_STEPS_TO_BENCHMARK:
        with phase(BENCHMARK_LABEL, None):
            found = probe(config, provisional, TokenDataset.open(data, "validation"))
    if minutes is not None:
        values["time_limit"] = time_left(minutes, start_time)
        values.update(validation_settings(found, values["time_limit"], values))
        worked, held_out = values["time_limit"] * duty_cycle / 100, train.manifest.validation.tokens
        values["steps"] = found.steps_in(worked, TrainSettings.provisional(values), held_out)
    else:
        values.setdefault("eval_every", max(1, values["steps"] // 10))
    passes = values["steps"] * provisional.batch_size * provisional.grad_accumulation_steps / rows
    values.setdefault("weight_decay", default_weight_decay(provisional.optimizer, passes))
    return found


def _save_base(run: Run, base: Checkpoint) -> None:
    """Save the model as it came as the checkpoint of step 0, its validation still owed."""
    model = Decoder(run.config)
    model.load_weights(list(load_float32_weights(base).items()))
    step = TrainStep(model, run.settings)
    mx.eval(step.state)
    run.save(step, TrainState())
