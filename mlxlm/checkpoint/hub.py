"""Download models from the Hugging Face hub, or find them in its cache."""

from __future__ import annotations

import re
from pathlib import Path

from mlxlm.checkpoint import pytorch, safetensors
from mlxlm.utils.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_OTHER_FILES = ["*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt"]
_SAFETENSORS = [*_OTHER_FILES, "model*.safetensors"]  # not consolidated.safetensors, the same weights again
_PYTORCH = [*_OTHER_FILES, "pytorch_model*.bin"]


def is_id(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(text) is not None


def download(id: str) -> Path:
    """Download a model into the hub's cache, unless it is there, and return its folder.

    PyTorch files are only downloaded if there are no safetensors. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN are respected.

    Raises:
        CheckpointError: The model can't be downloaded, with a hint.
    """
    folder = _snapshot(id, _SAFETENSORS)
    if safetensors.has_weights(folder):
        return folder
    folder = _snapshot(id, _PYTORCH)
    if pytorch.has_weights(folder):
        return folder
    raise CheckpointError(
        f"{id} has no safetensors and no PyTorch weights",
        "HF_HUB_OFFLINE=0 if the download is incomplete; hf download and the path of one file if it has GGUF files",
    )


def download_config(id: str) -> Path:
    """Download a model's config.json only and return its path. Raises CheckpointError as `download` does."""
    folder = _snapshot(id, ["config.json"])
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{id} has no config.json", "hf download and the path of one file if it has GGUF files")
    return folder / "config.json"


def _snapshot(id: str, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = id.partition("@")
    hint: str | None = None
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except errors.GatedRepoError:
        problem = f"{id} is gated"
        hint = f"request access at https://huggingface.co/{repository}, then hf auth login"
    except errors.RepositoryNotFoundError:
        problem, hint = (
            f"there is no path {id}, nor a model of this name on the hub",
            "check the spelling, or hf auth login",
        )
    except errors.RevisionNotFoundError:
        problem, hint = f"{repository} has no revision {revision}", "one of its branches, tags or commits"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        problem = f"{id} is neither a path nor in the cache, and the hub can't be reached"
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        hint = "HF_HUB_OFFLINE=0" if offline else "a network connection, or the path of a model"
    except Exception as error:  # whatever its HTTP client and file locks raise
        problem = f"{id} can't be downloaded: {' '.join(str(error).split()) or type(error).__name__}"
    raise CheckpointError(problem, hint)
