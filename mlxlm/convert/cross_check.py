"""Cross-check an output with other programs: each reads our greedy tokens and must predict the same ones.

mlx_lm, transformers and llama.cpp each run in their own process, which isolates their runtime and frees their memory at
the end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import LAYER_PREFIX, LayerwiseModel, load_checkpoint
from mlxlm.checkpoint.mlx_lm import MlxLmConfig, WritableCheckpoint
from mlxlm.config import ModelConfig
from mlxlm.convert.compare import to_float32
from mlxlm.convert.metadata import SAMPLE_TEXT, Check
from mlxlm.families import MLXLM_MODEL_TYPE, compatibility_warning, mlx_lm_mismatch, resolve_model_type
from mlxlm.generation import decoding
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model.norms import add_norm
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import CheckpointError, TokenizerError

# Modules that each needs.
REQUIRED_PACKAGES = {"mlx_lm": ("mlx_lm",), "transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp",)}
_SECONDS = 900
# Phrases in errors about an unsupported architecture or a missing library, as opposed to a broken file.
_UNKNOWN = re.compile(
    "not supported|does not recognize this architecture|unrecognized (model|configuration class)|no module named"
    "|requires the|not implemented|unknown model architecture",
    re.IGNORECASE,
)

_CHILD = "from mlxlm.convert.cross_check import main; main()"
# A program may predict another token if the two logits differ by less than this, in standard deviations of the logits:
# because of summation order in float32, or llama.cpp's rounding of activations to 8 bits.
_TIE = {"mlx_lm": 1e-3, "transformers": 1e-3, "llama.cpp": 0.02}
_TIE_QUANTIZED = 0.1
# llama.cpp rounds activations for products with these types.
_BLOCKS = frozenset(("Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"))
_HINT = "without `cross_check` to write it anyway"


@dataclass(frozen=True)
class BackendOutput:
    """A program's predictions for a text.

    Attributes:
        tokens: The most likely next token at each position.
        logit_gaps: By how much the logit of the text's token is below that of the most likely one.
        logit_std: Standard deviation of the logits over the vocabulary.
        hidden: Hidden states at the last position after the embedding and each layer but the last; of transformers.
        text_ids: The program's tokens of SAMPLE_TEXT; of llama.cpp.
    """

    tokens: list[int]
    logit_gaps: list[float]
    logit_std: float
    hidden: list[list[float]] | None = None
    text_ids: list[int] | None = None


class BackendUnavailable(Exception):
    """The program isn't installed, doesn't support the architecture, or took too long."""


class BackendRejected(CheckpointError):
    """The program supports the architecture but can't read the files."""


def run_backend(backend: str, path: Path, ids: Sequence[int], start: int) -> BackendOutput:
    """Run a program on tokens, and compare its predictions with `ids[start:]`.

    Args:
        backend: A name in REQUIRED_PACKAGES.
        path: The model.
        ids: Tokens.
        start: The first position to predict.

    Raises:
        BackendRejected: It can't read the files.
        BackendUnavailable: It can't run this model here.
    """
    missing = [name for name in REQUIRED_PACKAGES[backend] if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(f"{' and '.join(missing)} not installed")
    request = {"backend": backend, "path": str(path), "ids": list(ids), "start": start}
    try:
        done = subprocess.run(
            python_command("-c", _CHILD),
            env=python_environment(),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"it took longer than {_SECONDS} seconds") from None
    if done.returncode:
        reason = _reason(backend, done.stderr) or f"exit code {done.returncode}"
        if _UNKNOWN.search(reason):
            raise BackendUnavailable(reason[:200])
        raise BackendRejected(f"{backend} can't read it: {reason[:300]}")
    return BackendOutput(**json.loads(done.stdout.splitlines()[-1]))


def _reason(backend: str, stderr: str) -> str:
    """Why a process failed: its exception, or for llama.cpp, whose exceptions are generic, the error in its log."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if backend == "llama.cpp":
        log = lines[: next((i for i, line in enumerate(lines) if line.startswith("Traceback")), len(lines))]
        # The first error is the cause of the others.
        lines = [line for line in log if "error" in line.lower()][:1] or lines
    return lines[-1] if lines else ""


def main() -> None:
    """The process of one program: reads a request as JSON from stdin, writes a BackendOutput as JSON to stdout."""
    request = json.load(sys.stdin)
    run = {"mlx_lm": _mlx_lm, "transformers": _transformers, "llama.cpp": _llama_cpp}[request["backend"]]
    logits, others = run(request["path"], request["ids"][:-1])
    rows = np.asarray(logits[request["start"] - 1 :], dtype=np.float32)
    text_logits = rows[np.arange(len(rows)), request["ids"][request["start"] :]]
    gaps = (rows.max(-1) - text_logits).tolist()
    print(json.dumps(asdict(BackendOutput(rows.argmax(-1).tolist(), gaps, float(rows.std(-1).mean()), **others))))


def _mlx_lm(path: str, ids: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
    from mlx_lm.utils import load_model

    from mlxlm.backend.mlx import mx

    model, _ = load_model(Path(path), lazy=True, trust_remote_code=False)
    model.set_dtype(mx.float32)  # otherwise rounding to 16 bits would differ
    return np.array(model(mx.array([ids]))[0].astype(mx.float32)), {}


def _transformers(path: str, ids: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    )
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    # The last hidden state is normalized.
    return out.logits[0].numpy(), {"hidden": [state[0, -1].tolist() for state in out.hidden_states[:-1]]}


def _llama_cpp(path: str, ids: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
    import llama_cpp

    size, kv_type = len(ids) + 8, llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        path, n_ctx=size, n_batch=size, n_gpu_layers=0, logits_all=True, type_k=kv_type, type_v=kv_type
    )
    model.eval(ids)
    text_ids = model.tokenize(SAMPLE_TEXT.encode(), add_bos=True, special=False)
    return np.array(model.scores[: len(ids)]), {"text_ids": text_ids}


def cross_check_length(config: ModelConfig | MlxLmConfig) -> int:
    """The longest text that mlx_lm and llama.cpp compute as mlxlm does: they run some families without their window."""
    if isinstance(config, MlxLmConfig):
        return config.max_position_embeddings
    limits = (config.max_position_embeddings, config.sliding_window, config.longrope_original_length)
    return min(limit for limit in limits if limit)


def cross_check(
    source: WritableCheckpoint,
    written: WritableCheckpoint,
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
        backends: Names in `REQUIRED_PACKAGES`.
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
    source: WritableCheckpoint,
    written: WritableCheckpoint,
    label: str,
    ids: list[int],
    start: int,
    tokens_may_differ: bool = False,
) -> Check:
    """Run one program; raises CheckpointError if its tokens differ, BackendRejected if it can't read the output."""
    if isinstance(written, Checkpoint) and (problem := _known_difference(backend, written)):
        return problem
    try:
        output = run_backend(backend, written.path, ids, start)
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
        where = ""
        if output.hidden is not None and isinstance(written, Checkpoint):
            where = _first_layer(written, ids, output.hidden)
        tokens = f"token {output.tokens[worst]}, mlxlm {ours[worst]} (greedy token {worst + 1} of {count})"
        raise CheckpointError(f"{label}: {backend} predicts {tokens}{where}", _HINT)
    equal = "all equal" if not ties else f"{count - ties} equal, ties of two tokens: {ties}"
    text_ids = _check_tokenization(backend, source, output, label, tokens_may_differ)
    return Check(backend, "equal" if not ties else "within rounding", f"{count} greedy tokens: {equal}{text_ids}")


def _known_difference(backend: str, written: Checkpoint) -> Check | None:
    """The check of a program that can't run the model, or computes something else."""
    if backend != "llama.cpp" and resolve_model_type(written.config).model_type == MLXLM_MODEL_TYPE:
        return Check(backend, "skipped", compatibility_warning(written.config) or "")
    if backend == "mlx_lm" and (reason := mlx_lm_mismatch(written.config)):
        return Check(backend, "differs", reason)  # even if its greedy tokens happen to be equal
    return None


def _check_tokenization(
    backend: str, source: WritableCheckpoint, output: BackendOutput, label: str, tokens_may_differ: bool
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
    tokens = f"{output.text_ids[at : at + 3]}, the source {ids[at : at + 3]} (from token {at + 1} on)"
    raise CheckpointError(f"{label}: {backend} tokenizes a text differently: {tokens}", _HINT)


def _final_name(text: str, label: str) -> str:
    """A program's message with the output's final name instead of the temporary one."""
    return re.sub(r"[^\s'\"]*\.partial(/[^\s'\"]*)?", label, text)


def _same_of_source(backend: str, source: WritableCheckpoint, ids: list[int], start: int, refused: bool) -> bool:
    """Whether a program differs from mlxlm on the source's files, too: it rejects them, or predicts other tokens."""
    reads = source.format == "gguf" if backend == "llama.cpp" else (Path(source.path) / "config.json").is_file()
    if not reads:
        return False
    try:
        if refused:
            run_backend(backend, source.path, ids, start)
            return False
        ours = greedy_tokens(to_float32(source), ids[:start], len(ids) - start)
        output = run_backend(backend, source.path, [*ids[:start], *ours], start)
    except BackendUnavailable:
        return False
    except BackendRejected:
        return refused
    return not all(gap <= _TIE[backend] * output.logit_std for gap in output.logit_gaps)


def greedy_tokens(
    checkpoint: WritableCheckpoint,
    ids: Sequence[int],
    count: int,
    on_progress: Callable[[int], None] = lambda done: None,
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
            state = model.run(model.load_layer(index - 1), index - 1, 0, state)
        ours = np.array(add_norm(None, *state)[0][0, -1])
        if not np.linalg.norm(ours - np.array(other)) <= 1e-3 * np.linalg.norm(ours):
            name = f"{LAYER_PREFIX}.{index - 1}" if index else "model.embed_tokens"
            return f"; the first layer that differs is {name}"
    return "; all layers but the last are equal"
