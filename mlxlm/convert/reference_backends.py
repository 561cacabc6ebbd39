"""Run a model with other programs: mlx_lm, transformers and llama.cpp.

Each runs in its own process, which isolates its runtime and frees its memory at the end.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.convert.metadata import SAMPLE_TEXT
from mlxlm.utils.child_python import python_command, python_environment
from mlxlm.utils.errors import CheckpointError

# Modules that each needs.
REQUIRED_PACKAGES = {"mlx_lm": ("mlx_lm",), "transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp",)}
_SECONDS = 900
# Phrases in errors about an unsupported architecture or a missing library, as opposed to a broken file.
_UNKNOWN = re.compile(
    "not supported|does not recognize this architecture|unrecognized (model|configuration class)|no module named"
    "|requires the|not implemented|unknown model architecture",
    re.IGNORECASE,
)

_CHILD = "from mlxlm.convert.reference_backends import main; main()"


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
