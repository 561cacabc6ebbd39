"""What other programs make of an output: each reads our greedy tokens and must prefer the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.layerwise import LAYER_PREFIX, LayerwiseModel
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert import reference_backends
from mlxlm.convert.metadata import SAMPLE_TEXT, Check
from mlxlm.convert.tensor_diff import to_float32
from mlxlm.families import MLXLM_MODEL_TYPE, compatibility_warning, mlx_lm_activation_mismatch, resolve_model_type
from mlxlm.generation import Context, generate_tokens
from mlxlm.model.norms import add_norm
from mlxlm.utils.errors import CheckpointError, TokenizerError

# A peer may prefer another token where the two logits are this near, in standard deviations of the logits: float32
# sums in another order, or llama.cpp's rounding of activations to 8 bits.
_TIE = {"mlx_lm": 1e-3, "transformers": 1e-3, "llama.cpp": 0.02}
_TIE_QUANTIZED = 0.1
_BLOCKS = {"Q8_0", "Q4_0"}  # types that llama.cpp multiplies with rounded activations
_HINT = "without cross_check (--cross-check) to write it anyway"


def cross_check(
    source: Checkpoint,
    written: Checkpoint,
    label: str,
    backends: Sequence[str],
    ids: list[int],
    start: int,
    on_progress: Callable[[str, int, int], None],
    tokens_may_differ: bool = False,
) -> list[Check]:
    """What each of `backends` says about the text `ids`, of which `ids[start:]` are our greedy tokens.

    One that differs or can't read the output is an error, unless it is shown to be the peer's own way: transformers,
    whose layout it is, agrees about the same files, or the peer is apart from us over the source, too. Then it is a
    Check "differs" or "refused". `tokens_may_differ`: other ids of a text are no error.
    """
    checks: dict[str, Check] = {}
    failed: dict[str, CheckpointError] = {}
    for backend in backends:
        on_progress(f"asking {backend}", 0, 1)
        try:
            checks[backend] = cross_check_one(backend, source, written, label, ids, start, tokens_may_differ)
        except CheckpointError as error:
            failed[backend] = error
        on_progress(f"asking {backend}", 1, 1)
    agrees = "transformers" in checks and checks["transformers"].result != "skipped"
    for backend, error in failed.items():
        if not agrees and not _same_of_source(
            backend, source, ids, start, isinstance(error, reference_backends.BackendRejected)
        ):
            raise error
        reason = "transformers agrees with mlxlm" if agrees else "so it does with the source"
        result = "refused" if isinstance(error, reference_backends.BackendRejected) else "differs"
        said = error.message.removeprefix(f"{label}: ").removeprefix(f"{backend} ").removeprefix("can't read it: ")
        checks[backend] = Check(backend, result, f"{said}; {reason}")
    return [checks[backend] for backend in backends]


def cross_check_one(
    backend: str,
    source: Checkpoint,
    written: Checkpoint,
    label: str,
    ids: list[int],
    start: int,
    tokens_may_differ: bool = False,
) -> Check:
    """One peer's opinion of `written`. Raises CheckpointError where it differs, peers.Refused where it can't read."""
    if backend != "llama.cpp" and resolve_model_type(written.config).model_type == MLXLM_MODEL_TYPE:
        return Check(backend, "skipped", compatibility_warning(written.config))
    if backend == "mlx_lm" and (reason := mlx_lm_activation_mismatch(written.config)):
        return Check(backend, "differs", reason)  # greedy tokens may be alike all the same
    try:
        own = {"llama.cpp": {"text": SAMPLE_TEXT}, "transformers": {"hidden": True}}.get(backend, {})
        output = reference_backends.run_backend(backend, written.path, ids, start, **own)
    except reference_backends.BackendUnavailable as reason:
        return Check(backend, "skipped", _shown(str(reason), written.path, label))
    except reference_backends.BackendRejected as error:
        raise reference_backends.BackendRejected(
            f"{label}: {_shown(error.message, written.path, label)}", _HINT
        ) from None
    quantized = any(tensor.stored_dtype in _BLOCKS for tensor in written.tensors.values())
    allowed = output.logit_std * (_TIE_QUANTIZED if quantized and backend == "llama.cpp" else _TIE[backend])
    ours, count = ids[start:], len(ids) - start
    ties = sum(a != b for a, b in zip(output.tokens, ours, strict=True))
    worst = int(np.argmax(output.logit_gaps))
    if not output.logit_gaps[worst] <= allowed:  # not a number is an error, too
        where = "" if output.hidden is None else _first_layer(written, ids, output.hidden)
        raise CheckpointError(
            f"{label}: {backend} goes on with token {output.tokens[worst]} where mlxlm has {ours[worst]}"
            f" (greedy token {worst + 1} of {count}){where}",
            _HINT,
        )
    equal = "all equal" if not ties else f"{count - ties} equal, ties of two tokens: {ties}"
    text_ids = _same_words(backend, source, output, label, tokens_may_differ)
    return Check(backend, "equal" if not ties else "within rounding", f"{count} greedy tokens: {equal}{text_ids}")


def _same_words(
    backend: str, source: Checkpoint, output: reference_backends.BackendOutput, label: str, tokens_may_differ: bool
) -> str:
    """Whether the peer cuts a text into the source's tokens, where it was asked."""
    if output.text_ids is None:
        return ""
    try:
        ids = source.load_tokenizer().encode(SAMPLE_TEXT)
    except TokenizerError:
        return ""
    if ids == output.text_ids:
        return "; equal tokens of a text"
    if tokens_may_differ:
        return "; other tokens of a text, as the warnings say"
    at = next((i for i, (a, b) in enumerate(zip(ids, output.text_ids, strict=False)) if a != b), 0)
    raise CheckpointError(
        f"{label}: {backend} makes other tokens of a text: {output.text_ids[at : at + 3]} where its source has"
        f" {ids[at : at + 3]} (from token {at + 1} on)",
        _HINT,
    )


def _shown(text: str, path: Path, label: str) -> str:
    """A peer's words with the name that the output will have instead of the hidden one."""
    for name in dict.fromkeys((str(Path(path).resolve()), str(path), Path(path).name)):
        if ".partial" in name:
            text = text.replace(name, label)
    return re.sub(r"[^\s'\"]*\.partial(/[^\s'\"]*)?", label, text)


def _same_of_source(backend: str, source: Checkpoint, ids: list[int], start: int, refused: bool) -> bool:
    """Whether a peer is apart from mlxlm over the source's own files, too: it refuses them, or prefers other tokens."""
    reads = source.format == "gguf" if backend == "llama.cpp" else (Path(source.path) / "config.json").is_file()
    if not reads:
        return False
    try:
        if refused:
            reference_backends.run_backend(backend, source.path, ids, start)
            return False
        ours = greedy_tokens(to_float32(source), ids[:start], len(ids) - start)
        output = reference_backends.run_backend(backend, source.path, [*ids[:start], *ours], start)
    except reference_backends.BackendUnavailable:
        return False
    except reference_backends.BackendRejected:
        return refused
    return not all(gap <= _TIE[backend] * output.logit_std for gap in output.logit_gaps)


def greedy_tokens(
    checkpoint: Checkpoint, ids: Sequence[int], count: int, on_progress: Callable[[int], None] = lambda done: None
) -> list[int]:
    """The `count` most likely tokens after `ids`, each told when it is there."""
    model, _ = load_checkpoint(checkpoint)
    found = []
    for token in generate_tokens(Context(model), ids, lambda logits: mx.argmax(logits, axis=-1), count):
        found.append(token)
        on_progress(len(found))
    return found


def _first_layer(written: Checkpoint, ids: list[int], theirs: list[list[float]]) -> str:
    """The first layer after which a peer has another hidden state at the last position."""
    ours: list[Any] = []

    def keep(_index: int, state) -> None:
        ours.append(np.array(add_norm(None, *state)[0][0, -1].astype(mx.float32)))

    stages = LayerwiseModel(to_float32(written))
    inputs = mx.array([ids[:-1]])
    embedded = np.array(stages.embed(inputs)[0][0, -1].astype(mx.float32))
    mx.eval(stages.run(inputs, on_layer=keep))
    names = ["model.embed_tokens", *(f"{LAYER_PREFIX}.{index}" for index in range(stages.num_layers))]
    for name, mine, other in zip(names, [embedded, *ours], theirs, strict=False):
        if not np.linalg.norm(mine - np.array(other)) <= 1e-3 * np.linalg.norm(mine):
            return f"; the first layer that differs is {name}"
    return "; all layers but the last are equal"
