"""How far two models are apart: in what they say, after each layer, and in their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.layerwise import LAYER_PREFIX, HiddenState, LayerwiseModel
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.data import Document
from mlxlm.evaluate.windows import first_tokens, window_lengths, windows
from mlxlm.kernels import log_softmax
from mlxlm.utils.errors import CheckpointError

TOLERANCE = 1e-3  # relative error; the sums of float32 weights are far below it, those of 4 bits far above
ROUNDING = 1e-5  # nats per token; weights rounded to float16 are at 1e-7 to 1e-6, 8-bit ones at 1e-4 to 1e-3
_BATCH = 2048  # tokens that go through a layer at once
_LOGITS = 1 << 22  # logits of each model in memory at once; some ten arrays of their size are needed


@dataclass(frozen=True)
class Comparison:
    """What a model B says beside a model A, over `tokens` predicted tokens of one text, in windows of `context_length` tokens
    that move on by `stride`.

    kl: mean KL(A || B) in nats per token. top1: share of tokens for which both have the same most likely next
    one. loss_a, loss_b in nats per token; bits_per_byte_a, _b None where the text's bytes aren't known.
    max_logit_error: the largest absolute difference of two logits. layers: relative error |B - A| / |A| of the
    hidden states after the embedding and after each layer, by name; empty where the models have other sizes or
    run only whole. first_different: the first of these above `tolerance`.
    """

    tokens: int
    context_length: int
    stride: int
    kl: float
    top1_agreement: float
    loss_a: float
    loss_b: float
    bits_per_byte_a: float | None
    bits_per_byte_b: float | None
    max_logit_error: float
    layers: dict[str, float] = field(repr=False)
    first_different_layer: str | None
    tolerance: float

    @property
    def identical(self) -> bool:
        return self.max_logit_error == 0 and not any(self.layers.values())

    @property
    def equal_to_rounding(self) -> bool:
        """Whether the two differ by no more than sums in another order or weights in float16 do."""
        return self.kl < ROUNDING

    def worst_layers(self, n: int = 3) -> list[str]:
        """The layers that add most to the error, worst first: by the growth over the layer before."""
        before, growth = 0.0, {}
        for name, error in self.layers.items():
            growth[name] = error - before
            before = error
        return [name for name in sorted(growth, key=growth.get, reverse=True)[:n] if growth[name] > 0]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "worst_layers": self.worst_layers()}


def compare(
    a: Checkpoint,
    b: Checkpoint,
    documents: Sequence[Sequence[int]],
    *,
    text_bytes: int | None = None,
    context_length: int | None = None,
    stride: int | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run both over the tokens of `documents`, layer by layer, one layer of each in memory.

    Each document is read by itself, in the windows of `mlxlm.evaluate.text.evaluate_text`, and its first token is not
    predicted; `text_bytes` are the bytes of the others, for bits per byte. `progress(done, total)` counts layers.
    Models of mlx_lm run whole. Logits are made in pieces, so that memory is independent of the vocabulary.
    Raises CheckpointError for vocabularies of different sizes, ids outside them, and values that are not finite.
    """
    total = _Total()
    if a.config is None or b.config is None:
        models = [load_checkpoint(checkpoint) for checkpoint in (a, b)]
        configs = [config for _, config in models]
        lengths = _lengths(a, b, documents, context_length, stride, *configs)
        batches = _batches(documents, *lengths)
        for done, (inputs, targets) in enumerate(batches):
            for row, target in zip(inputs, targets, strict=True):
                total.add(*(model(row[None])[0, -target.size :] for model, _ in models), target)
            _tell(progress, done + 1, len(batches))
        layers: dict[str, float] = {}
    else:
        lengths = _lengths(a, b, documents, context_length, stride, a.config, b.config)
        layers = _lockstep(a, b, _batches(documents, *lengths), total, progress)
    if not math.isfinite(total.loss_b) or not math.isfinite(total.loss_a):
        broken = a if not math.isfinite(total.loss_a) else b
        raise CheckpointError(f"{broken.path}: its logits are not finite numbers")
    n = total.count
    per_byte = None if not text_bytes else n / math.log(2) / text_bytes
    return Comparison(
        tokens=n,
        context_length=lengths[0],
        stride=lengths[1],
        kl=total.kl / n,
        top1_agreement=total.agreed / n,
        loss_a=total.loss_a / n,
        loss_b=total.loss_b / n,
        bits_per_byte_a=None if per_byte is None else total.loss_a / n * per_byte,
        bits_per_byte_b=None if per_byte is None else total.loss_b / n * per_byte,
        max_logit_error=total.largest,
        layers=layers,
        first_different_layer=next((name for name, error in layers.items() if error > tolerance), None),
        tolerance=tolerance,
    )


def tokenize_for_both(
    a: Checkpoint, b: Checkpoint, documents: Callable[[], Iterable[Document]], count: int
) -> tuple[list[list[int]], int]:
    """The first `count` tokens of what `documents` gives, and the bytes of those that are predicted.

    Raises CheckpointError if the two tokenizers make other ids of it: then the models can't be compared.
    """
    found, other = (first_tokens(c.load_tokenizer(), documents(), count) for c in (a, b))
    if found[0] != other[0]:
        raise CheckpointError(
            f"the tokenizers of {a.path} and {b.path} make other tokens of the same text",
            "two models with one tokenizer",
        )
    return found


def _lengths(
    a: Checkpoint, b: Checkpoint, documents, context_length: int | None, stride: int | None, config_a, config_b
) -> tuple[int, int]:
    """The windows' context and stride, for two models that can both read these documents."""
    if config_a.vocab_size != config_b.vocab_size:
        raise CheckpointError(
            f"{a.path} has a vocabulary of {config_a.vocab_size} tokens and {b.path} one of {config_b.vocab_size}",
            "two models with one tokenizer",
        )
    if not any(len(tokens) > 1 for tokens in documents):
        raise CheckpointError("a comparison needs two tokens at least", "a longer text")
    for tokens in documents:
        if not all(0 <= token < config_a.vocab_size for token in tokens):
            raise CheckpointError(
                f"the text has ids that the models don't have (up to {max(tokens)})", "the models' own tokenizer"
            )
    most = min(config_a.max_position_embeddings, config_b.max_position_embeddings)
    return window_lengths(most, context_length, stride)


def _batches(documents, context_length: int, stride: int) -> list[tuple[mx.array, mx.array]]:
    """Batches of inputs, int `[B, T]`, and of the last targets in each row, int `[B, N]`, those to be predicted."""
    alike: dict[tuple[int, int], list[list[int]]] = {}
    for tokens in documents:
        for window, new in windows([list(tokens)], context_length, stride):
            alike.setdefault((len(window), new), []).append(window)
    batches = []
    for (length, new), rows in alike.items():
        together = max(1, _BATCH // length)
        for first in range(0, len(rows), together):
            ids = mx.array(rows[first : first + together])
            batches.append((ids[:, :-1], ids[:, -new:]))
    return batches


class _Total:
    """Sums over tokens, in double precision; `add` takes the logits `[n, V]` of both and the targets `[n]`."""

    def __init__(self) -> None:
        self.count = self.agreed = 0
        self.kl = self.loss_a = self.loss_b = self.largest = 0.0

    def add(self, logits_a: mx.array, logits_b: mx.array, targets: mx.array) -> None:
        logits_a, logits_b = logits_a.astype(mx.float32), logits_b.astype(mx.float32)
        log_a, log_b = log_softmax(logits_a), log_softmax(logits_b)
        kl = kl_divergence(log_a, log_b).sum()
        loss_a, loss_b = (-mx.take_along_axis(log, targets[:, None], axis=-1).sum() for log in (log_a, log_b))
        agreed = (logits_a.argmax(axis=-1) == logits_b.argmax(axis=-1)).sum()
        largest = mx.abs(logits_a - logits_b).max()
        mx.eval(kl, loss_a, loss_b, agreed, largest)
        self.kl += kl.item()
        self.loss_a += loss_a.item()
        self.loss_b += loss_b.item()
        self.agreed += agreed.item()
        self.largest = max(self.largest, largest.item())
        self.count += targets.size


def kl_divergence(log_p: mx.array, log_q: mx.array) -> mx.array:
    """The terms of KL(p || q), p·log(p/q) - p + q, none of them negative; the last two add up to nothing.

    Without them positive and negative terms cancel, and of a small divergence only float32's rounding is left.
    """
    p, change = mx.exp(log_p), log_q - log_p
    small = p * (mx.expm1(change) - change)  # exact where q is near p, and infinite where it is far above
    return mx.maximum(mx.where(mx.abs(change) < 0.5, small, mx.exp(log_q) - p - p * change), 0)


def _lockstep(a: Checkpoint, b: Checkpoint, batches, total: _Total, progress) -> dict[str, float]:
    """Both models over all batches, a layer at a time: adds to `total`, returns the error after each layer."""
    both = [LayerwiseModel(a), LayerwiseModel(b)]
    comparable = a.config.hidden_size == b.config.hidden_size and both[0].num_layers == both[1].num_layers
    steps = max(stages.num_layers for stages in both)
    states = [list(stages.embeddings(inputs for inputs, _ in batches)) for stages in both]
    names = ["model.embed_tokens", *(f"{LAYER_PREFIX}.{index}" for index in range(steps))]
    errors = {}
    for step, name in enumerate(names):
        if step:
            for side, stages in enumerate(both):
                if step <= stages.num_layers:
                    states[side] = list(_through(stages.load_layer(step - 1), states[side]))
        if comparable:
            errors[name] = _relative_error(*states)
            if not math.isfinite(errors[name]):
                broken = a if not all(_finite(state) for state in states[0]) else b
                raise CheckpointError(f"{broken.path}: values that are not finite numbers after {name}")
        mx.clear_cache()  # buffers of a layer that is gone
        _tell(progress, step + 1, steps + 2)
    heads = [stages.head() for stages in both]
    piece = max(1, _LOGITS // a.config.vocab_size)
    for state_a, state_b, (_, targets) in zip(*states, batches, strict=True):
        flat = [_flat(state, targets.shape[1]) for state in (state_a, state_b)] + [targets.flatten()]
        for start in range(0, flat[2].size, piece):
            cut = slice(start, start + piece)
            logits = [head(*_cut(state, cut))[0] for head, state in zip(heads, flat, strict=False)]
            total.add(*logits, flat[2][cut])
    _tell(progress, steps + 2, steps + 2)
    return errors


def _through(block, states: list[HiddenState]) -> Iterator[HiddenState]:
    for state in states:
        state = block(*state)
        mx.eval(state)
        yield state


def _hidden(state: HiddenState) -> mx.array:
    residual, hidden_states = state
    return residual if hidden_states is None else residual + hidden_states


def _flat(state: HiddenState, new: int) -> HiddenState:
    """The last `new` positions, `[B, T, hidden]` -> `[1, B·new, hidden]`: norm and head see each by itself."""
    return tuple(None if part is None else part[:, -new:].reshape(1, -1, part.shape[-1]) for part in state)


def _cut(state: HiddenState, cut: slice) -> HiddenState:
    return tuple(None if part is None else part[:, cut] for part in state)


def _relative_error(states_a: list[HiddenState], states_b: list[HiddenState]) -> float:
    difference = size = 0.0
    for a, b in zip(map(_hidden, states_a), map(_hidden, states_b), strict=True):
        a = a.astype(mx.float32)
        difference += mx.square(b - a).sum().item()
        size += mx.square(a).sum().item()
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def _finite(state: HiddenState) -> bool:
    return mx.isfinite(_hidden(state)).all().item()


def _tell(progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
