"""Models by their id on the Hugging Face hub: downloaded into its cache, or found there."""

from __future__ import annotations

import re
from pathlib import Path

from mlxlm.checkpoint import pytorch, safetensors
from mlxlm.utils.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_COMMON = ["*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt"]
_FILES = [*_COMMON, "model*.safetensors"]  # others are other forms of the same weights: consolidated.safetensors
_PYTORCH = [*_COMMON, "pytorch_model*.bin"]


def is_id(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`."""
    return _ID.fullmatch(text) is not None


def download(id: str) -> Path:
    """The folder of a model of the hub, in the hub's own cache; only what isn't there yet is fetched.

    PyTorch's files only where there are no safetensors. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN mean what they mean
    to the hub's own tools. Raises CheckpointError for a model that can't be had, with what would help.
    """
    folder = _snapshot(id, _FILES)
    if safetensors.has_weights(folder):
        return folder
    folder = _snapshot(id, _PYTORCH)
    if pytorch.has_weights(folder):
        return folder
    raise CheckpointError(
        f"{id} has no safetensors and no PyTorch weights here",
        "HF_HUB_OFFLINE=0 if it was downloaded in part; one file of it by its path if it has GGUF files (hf download)",
    )


def download_config(id: str) -> Path:
    """The file with a model's configuration, without its weights. Raises CheckpointError as `download` does."""
    folder = _snapshot(id, ["config.json"])
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{id} has no config.json", "one of its files by its path, if it has GGUF files")
    return folder / "config.json"


def _snapshot(id: str, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = id.partition("@")
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{id} is gated", f"asking for access at https://huggingface.co/{repository}, then hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no {id} here, nor a model of this name on the hub", "another spelling, or hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repository} has no revision {revision}", "a branch, tag or commit of it") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        raise CheckpointError(
            f"{id} is neither a path nor in the cache, and the hub can't be reached",
            "HF_HUB_OFFLINE=0" if offline else "a network connection, or the path of a model",
        ) from None
    except Exception as error:  # whatever its HTTP client and file locks raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{id} can't be downloaded: {text}") from error
