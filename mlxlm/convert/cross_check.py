"""What other programs make of an output: each reads our greedy tokens and must prefer the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.layerwise import LAYERS, Stages
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert import reference_backends
from mlxlm.convert.metadata import TEXT, Check
from mlxlm.convert.tensor_diff import in_float32
from mlxlm.families import OWN, caveat, misread, resolve_model_type
from mlxlm.generation.engine import Context, tokens
from mlxlm.model.norms import enter
from mlxlm.utils.errors import CheckpointError, TokenizerError

# A peer may prefer another token where the two logits are this near, in standard deviations of the logits: float32
# sums in another order, or llama.cpp's rounding of activations to 8 bits.
_TIE = {"mlx_lm": 1e-3, "transformers": 1e-3, "llama.cpp": 0.02}
_TIE_QUANTIZED = 0.1
_BLOCKS = {"Q8_0", "Q4_0"}  # types that llama.cpp multiplies with rounded activations
_HINT = "--no-verify writes it all the same"


def ask_others(
    source: Checkpoint,
    written: Checkpoint,
    label: str,
    others: Sequence[str],
    ids: list[int],
    start: int,
    tell: Callable[[str, int, int], None],
    warned: bool = False,
) -> list[Check]:
    """What each of `others` says about the text `ids`, of which `ids[start:]` are our greedy tokens.

    One that differs or can't read the output is an error, unless it is shown to be the peer's own way: transformers,
    whose layout it is, agrees about the same files, or the peer is apart from us over the source, too. Then it is a
    Check "differs" or "refused". `warned`: other ids of a text are no error.
    """
    checks: dict[str, Check] = {}
    failed: dict[str, CheckpointError] = {}
    for peer in others:
        tell(f"asking {peer}", 0, 1)
        try:
            checks[peer] = ask_one(peer, source, written, label, ids, start, warned)
        except CheckpointError as error:
            failed[peer] = error
        tell(f"asking {peer}", 1, 1)
    agrees = "transformers" in checks and checks["transformers"].result != "skipped"
    for peer, error in failed.items():
        if not agrees and not _same_of_source(peer, source, ids, start, isinstance(error, reference_backends.Refused)):
            raise error
        reason = "transformers agrees with mlxlm" if agrees else "so it does with the source"
        result = "refused" if isinstance(error, reference_backends.Refused) else "differs"
        said = error.message.removeprefix(f"{label}: ").removeprefix(f"{peer} ").removeprefix("can't read it: ")
        checks[peer] = Check(peer, result, f"{said}; {reason}")
    return [checks[peer] for peer in others]


def ask_one(
    peer: str, source: Checkpoint, written: Checkpoint, label: str, ids: list[int], start: int, warned: bool = False
) -> Check:
    """One peer's opinion of `written`. Raises CheckpointError where it differs, peers.Refused where it can't read."""
    if peer != "llama.cpp" and resolve_model_type(written.config).model_type == OWN:
        return Check(peer, "skipped", caveat(written.config))
    if peer == "mlx_lm" and (reason := misread(written.config)):
        return Check(peer, "differs", reason)  # greedy tokens may be alike all the same
    try:
        own = {"llama.cpp": {"text": TEXT}, "transformers": {"hidden": True}}.get(peer, {})
        opinion = reference_backends.ask(peer, written.path, ids, start, **own)
    except reference_backends.Unavailable as reason:
        return Check(peer, "skipped", _shown(str(reason), written.path, label))
    except reference_backends.Refused as error:
        raise reference_backends.Refused(f"{label}: {_shown(error.message, written.path, label)}", _HINT) from None
    quantized = any(tensor.stored in _BLOCKS for tensor in written.tensors.values())
    allowed = opinion.spread * (_TIE_QUANTIZED if quantized and peer == "llama.cpp" else _TIE[peer])
    ours, count = ids[start:], len(ids) - start
    ties = sum(a != b for a, b in zip(opinion.tokens, ours, strict=True))
    worst = int(np.argmax(opinion.gaps))
    if not opinion.gaps[worst] <= allowed:  # not a number is an error, too
        where = "" if opinion.hidden is None else _first_layer(written, ids, opinion.hidden)
        raise CheckpointError(
            f"{label}: {peer} goes on with token {opinion.tokens[worst]} where mlxlm has {ours[worst]}"
            f" (greedy token {worst + 1} of {count}){where}",
            _HINT,
        )
    equal = "all equal" if not ties else f"{count - ties} equal, ties of two tokens: {ties}"
    words = _same_words(peer, source, opinion, label, warned)
    return Check(peer, "equal" if not ties else "within rounding", f"{count} greedy tokens: {equal}{words}")


def _same_words(peer: str, source: Checkpoint, opinion: reference_backends.Opinion, label: str, warned: bool) -> str:
    """Whether the peer cuts a text into the source's tokens, where it was asked."""
    if opinion.words is None:
        return ""
    try:
        ids = source.load_tokenizer().encode(TEXT)
    except TokenizerError:
        return ""
    if ids == opinion.words:
        return "; equal tokens of a text"
    if warned:
        return "; other tokens of a text, as the warnings say"
    at = next((i for i, (a, b) in enumerate(zip(ids, opinion.words, strict=False)) if a != b), 0)
    raise CheckpointError(
        f"{label}: {peer} makes other tokens of a text: {opinion.words[at : at + 3]} where its source has"
        f" {ids[at : at + 3]} (from token {at + 1} on)",
        _HINT,
    )


def _shown(text: str, path: Path, label: str) -> str:
    """A peer's words with the name that the output will have instead of the hidden one."""
    for name in dict.fromkeys((str(Path(path).resolve()), str(path), Path(path).name)):
        if ".partial" in name:
            text = text.replace(name, label)
    return re.sub(r"[^\s'\"]*\.partial(/[^\s'\"]*)?", label, text)


def _same_of_source(peer: str, source: Checkpoint, ids: list[int], start: int, refused: bool) -> bool:
    """Whether a peer is apart from mlxlm over the source's own files, too: it refuses them, or prefers other tokens."""
    reads = source.format == "gguf" if peer == "llama.cpp" else (Path(source.path) / "config.json").is_file()
    if not reads:
        return False
    try:
        if refused:
            reference_backends.ask(peer, source.path, ids, start)
            return False
        ours = greedy(in_float32(source), ids[:start], len(ids) - start)
        opinion = reference_backends.ask(peer, source.path, [*ids[:start], *ours], start)
    except reference_backends.Unavailable:
        return False
    except reference_backends.Refused:
        return refused
    return not all(gap <= _TIE[peer] * opinion.spread for gap in opinion.gaps)


def greedy(
    checkpoint: Checkpoint, ids: Sequence[int], count: int, tell: Callable[[int], None] = lambda done: None
) -> list[int]:
    """The `count` most likely tokens after `ids`, each told when it is there."""
    model, _ = load_checkpoint(checkpoint)
    found = []
    for token in tokens(Context(model), ids, lambda logits: mx.argmax(logits, axis=-1), count):
        found.append(token)
        tell(len(found))
    return found


def _first_layer(written: Checkpoint, ids: list[int], theirs: list[list[float]]) -> str:
    """The first layer after which a peer has another hidden state at the last position."""
    ours: list[Any] = []

    def keep(_index: int, state) -> None:
        ours.append(np.array(enter(None, *state)[0][0, -1].astype(mx.float32)))

    stages = Stages(in_float32(written))
    inputs = mx.array([ids[:-1]])
    embedded = np.array(stages.embed(inputs)[0][0, -1].astype(mx.float32))
    mx.eval(stages.run(inputs, on_layer=keep))
    names = ["model.embed_tokens", *(f"{LAYERS}.{index}" for index in range(stages.layers))]
    for name, mine, other in zip(names, [embedded, *ours], theirs, strict=False):
        if not np.linalg.norm(mine - np.array(other)) <= 1e-3 * np.linalg.norm(mine):
            return f"; the first layer that differs is {name}"
    return "; all layers but the last are equal"
