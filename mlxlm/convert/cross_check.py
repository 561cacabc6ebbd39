"""Cross-check an output with other programs: each reads our greedy tokens and must predict the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.layerwise import LAYER_PREFIX, LayerwiseModel
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert import reference_backends
from mlxlm.convert.metadata import SAMPLE_TEXT, Check
from mlxlm.convert.reference_backends import BackendOutput, BackendRejected, BackendUnavailable
from mlxlm.convert.tensor_diff import to_float32
from mlxlm.families import MLXLM_MODEL_TYPE, compatibility_warning, mlx_lm_activation_mismatch, resolve_model_type
from mlxlm.generation import decoding
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model.norms import add_norm
from mlxlm.utils.errors import CheckpointError, TokenizerError

# A program may predict another token if the two logits differ by less than this, in standard deviations of the logits:
# because of summation order in float32, or llama.cpp's rounding of activations to 8 bits.
_TIE = {"mlx_lm": 1e-3, "transformers": 1e-3, "llama.cpp": 0.02}
_TIE_QUANTIZED = 0.1
_BLOCKS = {"Q8_0", "Q4_0"}  # llama.cpp rounds activations for products with these types
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
    """Run an output with other programs on our greedy tokens.

    A program that predicts other tokens or can't read the output is an error, unless transformers agrees with us about
    the same files, or the program differs in the same way on the source. Then its check is "differs" or "refused".

    Args:
        source: The source.
        written: The output, opened again.
        label: The output's name in errors.
        backends: Names in `reference_backends.REQUIRED_PACKAGES`.
        ids: A text.
        start: `ids[start:]` are our greedy tokens.
        on_progress: Called as `on_progress(phase, done, total)`.
        tokens_may_differ: Whether a program may tokenize some texts differently.

    Raises:
        CheckpointError: A program predicts other tokens, or can't read the output.
    """
    checks: dict[str, Check] = {}
    failed: dict[str, CheckpointError] = {}
    for backend in backends:
        on_progress(f"running {backend}", 0, 1)
        try:
            checks[backend] = cross_check_one(backend, source, written, label, ids, start, tokens_may_differ)
        except CheckpointError as error:
            failed[backend] = error
        on_progress(f"running {backend}", 1, 1)
    agrees = "transformers" in checks and checks["transformers"].result != "skipped"
    for backend, failure in failed.items():
        refused = isinstance(failure, BackendRejected)
        if not agrees and not _same_of_source(backend, source, ids, start, refused):
            raise failure
        reason = "transformers agrees with mlxlm" if agrees else "the same happens with the source"
        problem = failure.message.removeprefix(f"{label}: ").removeprefix(f"{backend} ").removeprefix("can't read it: ")
        checks[backend] = Check(backend, "refused" if refused else "differs", f"{problem}; {reason}")
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
    """Run one program; raises CheckpointError if its tokens differ, BackendRejected if it can't read the output."""
    if backend != "llama.cpp" and resolve_model_type(written.config).model_type == MLXLM_MODEL_TYPE:
        return Check(backend, "skipped", compatibility_warning(written.config) or "")
    if backend == "mlx_lm" and (reason := mlx_lm_activation_mismatch(written.config)):
        return Check(backend, "differs", reason)  # even if its greedy tokens happen to be equal
    try:
        output = reference_backends.run_backend(backend, written.path, ids, start)
    except BackendUnavailable as error:
        return Check(backend, "skipped", _final_name(str(error), label))
    except BackendRejected as error:
        raise BackendRejected(f"{label}: {_final_name(error.message, label)}", _HINT) from None
    quantized = any(tensor.stored_dtype in _BLOCKS for tensor in written.tensors.values())
    allowed = output.logit_std * (_TIE_QUANTIZED if quantized and backend == "llama.cpp" else _TIE[backend])
    ours, count = ids[start:], len(ids) - start
    ties = sum(a != b for a, b in zip(output.tokens, ours, strict=True))
    worst = int(np.argmax(output.logit_gaps))
    if not output.logit_gaps[worst] <= allowed:  # NaN is an error, too
        where = "" if output.hidden is None else _first_layer(written, ids, output.hidden)
        raise CheckpointError(
            f"{label}: {backend} predicts token {output.tokens[worst]}, mlxlm {ours[worst]}"
            f" (greedy token {worst + 1} of {count}){where}",
            _HINT,
        )
    equal = "all equal" if not ties else f"{count - ties} equal, ties of two tokens: {ties}"
    text_ids = _check_tokenization(backend, source, output, label, tokens_may_differ)
    return Check(backend, "equal" if not ties else "within rounding", f"{count} greedy tokens: {equal}{text_ids}")


def _check_tokenization(
    backend: str, source: Checkpoint, output: BackendOutput, label: str, tokens_may_differ: bool
) -> str:
    """Compare how the program and the source's tokenizer tokenize a text, if the program did."""
    if output.text_ids is None:
        return ""
    try:
        ids = source.load_tokenizer().encode(SAMPLE_TEXT)
    except TokenizerError:
        return ""
    if ids == output.text_ids:
        return "; a text has equal tokens"
    if tokens_may_differ:
        return "; a text has other tokens, see the warnings"
    at = next((i for i, (a, b) in enumerate(zip(ids, output.text_ids, strict=False)) if a != b), 0)
    raise CheckpointError(
        f"{label}: {backend} tokenizes a text differently: {output.text_ids[at : at + 3]}, the source"
        f" {ids[at : at + 3]} (from token {at + 1} on)",
        _HINT,
    )


def _final_name(text: str, label: str) -> str:
    """A program's message with the output's final name instead of the temporary one."""
    return re.sub(r"[^\s'\"]*\.partial(/[^\s'\"]*)?", label, text)


def _same_of_source(backend: str, source: Checkpoint, ids: list[int], start: int, refused: bool) -> bool:
    """Whether a program differs from mlxlm on the source's files, too: it rejects them, or predicts other tokens."""
    reads = source.format == "gguf" if backend == "llama.cpp" else (Path(source.path) / "config.json").is_file()
    if not reads:
        return False
    try:
        if refused:
            reference_backends.run_backend(backend, source.path, ids, start)
            return False
        ours = greedy_tokens(to_float32(source), ids[:start], len(ids) - start)
        output = reference_backends.run_backend(backend, source.path, [*ids[:start], *ours], start)
    except BackendUnavailable:
        return False
    except BackendRejected:
        return refused
    return not all(gap <= _TIE[backend] * output.logit_std for gap in output.logit_gaps)


def greedy_tokens(
    checkpoint: Checkpoint, ids: Sequence[int], count: int, on_progress: Callable[[int], None] = lambda done: None
) -> list[int]:
    """Generate `count` tokens greedily after `ids`; calls `on_progress` with the number of tokens so far."""
    model, _ = load_checkpoint(checkpoint)
    tokens = []
    for token in decoding.greedy_tokens(DecodeStep(model), ids, count):
        tokens.append(token)
        on_progress(len(tokens))
    return tokens


def _first_layer(written: Checkpoint, ids: list[int], theirs: list[list[float]]) -> str:
    """The first layer after which a program has another hidden state at the last position."""
    model = LayerwiseModel(to_float32(written))
    [state] = model.embeddings([mx.array([ids[:-1]])])
    for index, other in enumerate(theirs):
        if index:
            state = model.load_layer(index - 1)(*state)
        ours = np.array(add_norm(None, *state)[0][0, -1])
        if not np.linalg.norm(ours - np.array(other)) <= 1e-3 * np.linalg.norm(ours):
            name = f"{LAYER_PREFIX}.{index - 1}" if index else "model.embed_tokens"
            return f"; the first layer that differs is {name}"
    return "; all layers but the last are equal"
