"""What was written is read again and compared with its source: tensors, logits, greedy tokens, and other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mlxlm import peers, platform
from mlxlm._mlx import mx
from mlxlm.checkpoint.bits import same_bits
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.source import Checkpoint
from mlxlm.checkpoint.tensors import Tensor
from mlxlm.compare import Comparison, compare
from mlxlm.config import ModelConfig
from mlxlm.difference import plain
from mlxlm.errors import CheckpointError, TokenizerError
from mlxlm.generation.engine import Context, tokens
from mlxlm.stages import LAYERS, Stages

GREEDY = 64  # tokens
TEXT = """The lighthouse keeper wrote down the weather every morning: the wind, the height of the waves, and whether
the mail boat could land. In March 1911 it could not for nineteen days. "We have flour," he noted, "and oil for the
lamp, and two books that I know by heart." On the twentieth day he counted 3 ships and 1 whale.

def area(width, height):
    return width * height  # in square metres
"""

# The largest KL divergence (nats per token) that rounding to a type may cost. They are bounds for what is wrong, not
# for what is good: a matrix in another place or a wrong rotary base costs whole nats in a trained model.
ALLOWED = {"F32": 1e-5, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.05, "Q4_0": 1.0}

# llama.cpp's blocks of 32 weights with a scale in float16. A weight is off by at most this share of its block's largest
# one: half a step of 1/127, or a whole one of 1/8 at the end that has no own value; 2^-11 is the scale's rounding.
_STEP = {"Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}
_SUBNORMAL = {"Q8_0": 128 * 2**-25, "Q4_0": 8 * 2**-25}  # for scales below float16's normal range
_BLOCK = 32

# A peer may prefer another token where the two logits are this near, in standard deviations of the logits: float32
# sums in another order, or llama.cpp's rounding of activations to 8 bits.
_TIE = {"mlx_lm": 1e-3, "transformers": 1e-3, "llama.cpp": 0.02}
_TIE_QUANTIZED = 0.1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Check:
    """One thing that was compared: `result` is "equal", "within rounding", "skipped", or "differs" for a peer that has
    its own way with this model; `detail` one phrase."""

    name: str
    result: str
    detail: str


def verify(
    source: Checkpoint, written: Checkpoint, label: str, others: Sequence[str] = (), progress: Progress | None = None
) -> list[Check]:
    """Compare `written`, called `label` in errors, with `source` and with what the peers `others` make of it.

    `others` are names in `peers.NEEDS`. `progress(phase, done, total)` is told how far each phase is. Where every
    weight is equal to the bit, so must be the logits and the greedy tokens. Where weights were rounded, each must
    be its source rounded to its type, and the logits within `ALLOWED` of that type.
    Raises CheckpointError naming the first tensor or layer that differs by more.
    """
    tell = progress or (lambda phase, done, total: None)
    rounded = _check_tensors(source, written, label, tell)
    wide, written_wide = _in_float32(source), _in_float32(written)
    exact = not rounded
    detail = "to the bit" if exact else "rounded to " + ", ".join(sorted(rounded))
    checks = [Check("tensors", "equal" if exact else "within rounding", detail)]
    ids = prompt(source)
    said = compare(wide, written_wide, ids, progress=lambda done, total: tell("comparing logits", done, total))
    checks.append(_judged(said, rounded, label))
    reason = _too_large(written)
    if reason:
        return [*checks, *(Check(name, "skipped", reason) for name in ("greedy tokens", *others))]
    room, window = _room(written.config), written.config.sliding_window
    start = max(1, min(16, room // 2, len(ids) // 2, (window or room) // 2))
    count = min(GREEDY, room - start)
    tell("comparing greedy tokens", 0, 2)
    theirs = _greedy(wide, ids[:start], count)
    tell("comparing greedy tokens", 1, 2)
    ours = _greedy(written_wide, ids[:start], count)
    tell("comparing greedy tokens", 2, 2)
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), count)
    if exact and same < count:
        raise CheckpointError(f"{label}: greedy token {same + 1} is {ours[same]} and was {theirs[same]}")
    result = "equal" if same == count else "within rounding"
    checks.append(Check("greedy tokens", result, f"the first {same} of {count} are equal"))
    # mlx_lm and llama.cpp run some families without their window: what they are asked about is no longer.
    text = [*ids[:start], *ours][: max(window or room, 2)]
    return [*checks, *_peers(source, written, label, others, text, start, tell)]


def prompt(checkpoint: Checkpoint) -> list[int]:
    """Tokens to compare logits on: of `TEXT`, or any where there is no tokenizer for it."""
    size = checkpoint.config.vocab_size
    try:
        ids = checkpoint.load_tokenizer().encode(TEXT)
    except TokenizerError:
        ids = [(7919 * i + 31) % size for i in range(128)]
    return [i for i in ids if i < size][: checkpoint.config.max_position_embeddings]


def _check_tensors(source: Checkpoint, written: Checkpoint, label: str, tell: Progress) -> set[str]:
    """The types that weights were rounded to; empty if all are equal. Raises CheckpointError for any other change."""
    before, after = plain(source), plain(written)
    apart = [name for name in before if name not in after] + [name for name in after if name not in before]
    if apart:
        raise CheckpointError(f"{label}: {apart[0]} is in only one of source and output")
    rounded = set()
    for done, (name, tensor) in enumerate(before.items(), start=1):
        if tensor.shape != after[name].shape:
            raise CheckpointError(
                f"{label}: {name} is {list(after[name].shape)} and was {list(tensor.shape)} in {source.path}"
            )
        result = _changed(tensor, after[name])
        if result is None:
            raise CheckpointError(f"{label}: {name} differs from {source.path}")
        if result:
            rounded.add(after[name].stored)
        tell("comparing tensors", done, len(before))
    return rounded


def _changed(source: Tensor, written: Tensor) -> bool | None:
    """Whether rounding changed a value; None for a change that rounding doesn't explain."""
    a, b = source.read(), written.read()
    if a.dtype == b.dtype and same_bits(a, b):
        return False
    x, y = a.astype(mx.float32), b.astype(mx.float32)
    if mx.array_equal(x, y).item():
        return False
    if written.stored in _STEP:
        blocks, error = mx.abs(x).reshape(-1, _BLOCK), mx.abs(y - x).reshape(-1, _BLOCK)
        limit = blocks.max(axis=-1, keepdims=True) * _STEP[written.stored] + _SUBNORMAL[written.stored]
        return True if (error <= limit).all().item() else None
    if mx.array_equal(a.astype(b.dtype).astype(mx.float32), y).item():
        return True
    # A format may keep a vector in another form: llama.cpp has Gemma's norms plus one, in float32.
    near = b.dtype == mx.float32 and x.ndim == 1 and (mx.abs(y - x) <= 2**-22 * mx.maximum(1, mx.abs(x))).all().item()
    return True if near else None


def _judged(said: Comparison, rounded: set[str], label: str) -> Check:
    limit = max((ALLOWED.get(kind, ALLOWED["F32"]) for kind in rounded), default=ALLOWED["F32"])
    detail = f"KL {said.kl:.2g} nats/token, top-1 agreement {100 * said.top1:.1f} %"
    if said.identical:
        return Check("logits", "equal", f"to the bit over {said.tokens} tokens")
    if said.kl > limit or (not rounded and said.first_different):
        # Without rounding, sums are in the same order: what differs is the configuration.
        first = said.first_different or next(iter(said.worst(1)), "the output head")
        raise CheckpointError(f"{label}: its logits differ from the source's, from {first} on ({detail})")
    return Check("logits", "within rounding", detail)


def _too_large(checkpoint: Checkpoint) -> str | None:
    """Why the model isn't run as a whole here; None if it has room, in float32, as peers on a CPU need it too."""
    needed = 4 * checkpoint.config.parameter_count()
    room = min(psutil.virtual_memory().available, platform.total_memory())
    if needed < 0.7 * room:
        return None
    return f"the model needs {needed / 1e9:.1f} GB in float32, {room / 1e9:.1f} GB are free"


def _in_float32(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights in float32, so that rounding while computing isn't taken for a change of the files."""
    tensors = {name: tensor.astype(mx.float32) for name, tensor in plain(checkpoint).items()}
    return replace(checkpoint, tensors=tensors, config=checkpoint.config.with_changes(quantization=None))


def _room(config: ModelConfig) -> int:
    """How many tokens a text may have that is generated step by step: its context, or where its positions change."""
    scaling = config.rope_scaling or {}
    changes = scaling.get("original_max_position_embeddings") if scaling.get("rope_type") == "longrope" else None
    return min(config.max_position_embeddings, changes or config.max_position_embeddings)


def _greedy(checkpoint: Checkpoint, ids: Sequence[int], count: int) -> list[int]:
    model, _ = load_checkpoint(checkpoint)
    return list(tokens(Context(model), ids, lambda logits: mx.argmax(logits, axis=-1), count))


def _peers(
    source: Checkpoint,
    written: Checkpoint,
    label: str,
    others: Sequence[str],
    ids: list[int],
    start: int,
    tell: Progress,
) -> list[Check]:
    """What each peer says. One that differs is an error, unless it is shown to be the peer's own way: transformers,
    whose layout it is, agrees about the same files, or the peer says the same of the source."""
    checks: dict[str, Check] = {}
    refused: dict[str, CheckpointError] = {}
    for done, peer in enumerate(others):
        tell("asking other programs", done, len(others))
        try:
            checks[peer] = _peer(peer, written, label, ids, start)
        except CheckpointError as error:
            refused[peer] = error
    tell("asking other programs", len(others), len(others))
    agrees = "transformers" in checks and checks["transformers"].result != "skipped"
    for peer, error in refused.items():
        if not agrees and not _same_of_source(peer, source, written, ids, start):
            raise error
        reason = "transformers agrees with mlxlm" if agrees else "so it does with the source"
        checks[peer] = Check(peer, "differs", f"{error.message}; {reason}")
    return [checks[peer] for peer in others]


def _same_of_source(peer: str, source: Checkpoint, written: Checkpoint, ids: list[int], start: int) -> bool:
    """Whether a peer makes of the source's own files what it makes of the written ones."""
    reads = source.format == "gguf" if peer == "llama.cpp" else (Path(source.path) / "config.json").is_file()
    if not reads:
        return False
    found = []
    for checkpoint in (source, written):
        try:
            found.append(peers.ask(peer, checkpoint.path, ids, start).tokens)
        except peers.Unavailable:
            return False
        except CheckpointError:
            found.append(None)
    return found[0] == found[1]


def _peer(peer: str, written: Checkpoint, label: str, ids: list[int], start: int) -> Check:
    """A peer reads our greedy tokens and must prefer each of them, but for ties."""
    try:
        opinion = peers.ask(peer, written.path, ids, start)
    except peers.Unavailable as reason:
        return Check(peer, "skipped", str(reason))
    quantized = any(tensor.stored in _STEP for tensor in written.tensors.values())
    allowed = opinion.spread * (_TIE_QUANTIZED if quantized and peer == "llama.cpp" else _TIE[peer])
    ours, count = ids[start:], len(ids) - start
    ties = sum(a != b for a, b in zip(opinion.tokens, ours, strict=True))
    worst = int(np.argmax(opinion.gaps))
    if not opinion.gaps[worst] <= allowed:  # not a number is an error, too
        where = _first_layer(peer, written, ids, start)
        raise CheckpointError(
            f"{label}: {peer} goes on with token {opinion.tokens[worst]} where mlxlm has {ours[worst]}"
            f" (greedy token {worst + 1} of {count}){where}"
        )
    equal = "all equal" if not ties else f"{count - ties} equal, ties of two tokens: {ties}"
    return Check(peer, "equal" if not ties else "within rounding", f"{count} greedy tokens: {equal}")


def _first_layer(peer: str, written: Checkpoint, ids: list[int], start: int) -> str:
    """The first layer after which a peer that shows its hidden states has others."""
    if peer != "transformers":
        return ""
    theirs = peers.ask(peer, written.path, ids, start, hidden=True).hidden
    ours: list[Any] = []

    def keep(_index: int, state) -> None:
        stream, update = state
        ours.append(np.array((stream + update)[0, -1].astype(mx.float32)))

    stages = Stages(_in_float32(written))
    inputs = mx.array([ids[:-1]])
    embedded = np.array(stages.embed(inputs)[0][0, -1].astype(mx.float32))
    mx.eval(stages.run(inputs, on_layer=keep))
    names = ["model.embed_tokens", *(f"{LAYERS}.{index}" for index in range(stages.layers))]
    for name, mine, other in zip(names, [embedded, *ours], theirs, strict=False):
        if not np.linalg.norm(mine - np.array(other)) <= 1e-3 * np.linalg.norm(mine):
            return f"; the first layer that differs is {name}"
    return "; all layers but the last are equal"
