"""Other programs that read what we write, asked for their next tokens: mlx_lm, transformers and llama.cpp.

Each runs in a process of its own, since each brings its own runtime and much memory, and gives it back at the end.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.utils.errors import CheckpointError

# What each needs to be importable.
REQUIRED_PACKAGES = {"mlx_lm": ("mlx_lm",), "transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp",)}
_SECONDS = 900
# Phrases by which a peer says that it has no such architecture, or lacks a library for it, not that something is
# wrong with the file.
_UNKNOWN = (
    "not supported", "does not recognize this architecture", "unrecognized model", "unrecognized configuration class",
    "no module named", "requires the", "not implemented",
    "unknown model architecture",
)  # fmt: skip

# What the process runs: with this one's search path, so that nothing is imported out of the current folder.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mlxlm.convert.reference_backends import main; main()"
)


@dataclass(frozen=True)
class BackendOutput:
    """What a peer says at each position of a text: its most likely next token, and by how much the logit of
    the text's own token is below that one's. `logit_std`: standard deviation of the logits over the vocabulary.
    hidden: the stream at the last position, after the embedding and each layer but the last, where asked for.
    text_ids: its own tokens of a text, where asked for."""

    tokens: list[int]
    logit_gaps: list[float]
    logit_std: float
    hidden: list[list[float]] | None = None
    text_ids: list[int] | None = None


class BackendUnavailable(Exception):
    """The peer isn't installed, has no such architecture, or took too long: no opinion, no error."""


class BackendRejected(CheckpointError):
    """The peer has the architecture and can't read the files."""


def run_backend(
    backend: str, path: Path, ids: Sequence[int], start: int, hidden: bool = False, text: str | None = None
) -> BackendOutput:
    """`backend` reads the tokens `ids` with the model in `path`; its opinion on `ids[start:]`, each token given those
    before it, and on `text`, which llama.cpp cuts into tokens by what the file says. Raises Unavailable or Refused."""
    missing = [name for name in REQUIRED_PACKAGES[backend] if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(f"{' and '.join(missing)} not installed")
    request = {"backend": backend, "path": str(path), "ids": list(ids), "start": start, "hidden": hidden, "text": text}
    command = [sys.executable, "-c", _CHILD, json.dumps([folder for folder in sys.path if folder])]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"it took longer than {_SECONDS} seconds") from None
    if done.returncode:
        reason = _reason(backend, done.stderr) or f"exit code {done.returncode}"
        if any(phrase in reason.lower() for phrase in _UNKNOWN):
            raise BackendUnavailable(reason[:200])
        raise BackendRejected(f"{backend} can't read it: {reason[:300]}")
    return BackendOutput(**json.loads(done.stdout.splitlines()[-1]))


def _reason(backend: str, stderr: str) -> str:
    """Why a process ended: its exception, or what llama.cpp's log says, whose exception says no more than that."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if backend == "llama.cpp":
        log = lines[: next((i for i, line in enumerate(lines) if line.startswith("Traceback")), len(lines))]
        # The first of them is the cause, and the others are of what then failed, too.
        lines = [line for line in log if "error" in line.lower()][:1] or lines
    return lines[-1] if lines else ""


def main() -> None:
    """The process of one peer: a request as JSON on stdin, an Opinion as JSON on stdout."""
    print(json.dumps(_answer(json.load(sys.stdin))))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    run = {"mlx_lm": _mlx_lm, "transformers": _transformers, "llama.cpp": _llama_cpp}[request["backend"]]
    logits, found = run(request["path"], request["ids"][:-1], request)
    rows = np.asarray(logits[request["start"] - 1 :], dtype=np.float32)
    own = rows[np.arange(len(rows)), request["ids"][request["start"] :]]
    return {
        "tokens": rows.argmax(-1).tolist(),
        "logit_gaps": (rows.max(-1) - own).tolist(),
        "logit_std": float(rows.std(-1).mean()),
        **found,
    }


def _mlx_lm(path: str, ids: list[int], _request: dict[str, Any]):
    import numpy as np
    from mlx_lm.utils import load_model

    from mlxlm.backend.mlx import mx

    model, _ = load_model(Path(path), lazy=True, trust_remote_code=False)
    model.set_dtype(mx.float32)  # rounding in another dtype would be what is compared
    return np.array(model(mx.array([ids]))[0].astype(mx.float32)), {}


def _transformers(path: str, ids: list[int], request: dict[str, Any]):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    )
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=request["hidden"], use_cache=False)
    # The last of the hidden states is the normed one.
    states = [state[0, -1].tolist() for state in out.hidden_states[:-1]] if request["hidden"] else None
    return out.logits[0].numpy(), {"hidden": states}


def _llama_cpp(path: str, ids: list[int], request: dict[str, Any]):
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        path, n_ctx=len(ids) + 8, n_batch=len(ids) + 8, n_gpu_layers=0, logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(ids)
    text = request["text"]
    text_ids = None if text is None else model.tokenize(text.encode(), add_bos=True, special=False)
    return np.array(model.scores[: len(ids)]), {"text_ids": text_ids}
