"""Upload a model to the Hugging Face hub, with a model card."""

from __future__ import annotations

from pathlib import Path

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.locations import QUANTIZATION_PLOT, RUN_FILE, gguf_models, locate
from mlxlm.convert.model_card import CARD, is_generated, is_gguf, model_card
from mlxlm.utils.errors import CheckpointError

_FILES = ("*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt", "LICENSE*", CARD, QUANTIZATION_PLOT)
_WEIGHTS = "model*.safetensors"


def upload(path: Path, id: str, *, license: str | None = None, private: bool = False) -> str:
    """Upload a model in one commit, to a new repository or as the next version of an existing one.

    Without a README.md of the user's in the folder, a new repository gets the `model_card`, and an existing one keeps
    its own.

    Args:
        path: A folder with safetensors, a run (its best checkpoint), or a .gguf file with the other parts of its model.
        id: `owner/name` on the hub.
        license: Identifier of the license for the model card, such as "apache-2.0".
        private: Whether a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        CheckpointError: There is no such model, or it can't be uploaded.
    """
    files = model_files(path)
    own = CARD in files and not is_generated(path)
    cards = {} if own else {CARD: model_card(path, id, license).encode()}
    return hub.upload({n: f for n, f in files.items() if n not in cards}, cards, id, private=private, replaced=_WEIGHTS)


def model_files(path: Path) -> dict[str, Path]:
    """The files to upload, by name. Of a run these are the best checkpoint and the tokenizer.

    Raises:
        CheckpointError: There is no model, or one in a format that others don't load.
    """
    if is_gguf(path):
        parts = next((model for model in gguf_models(path.parent) if path in model), [])
        if not parts:
            raise CheckpointError(f"there is no file {path}", "a .gguf file, a model folder or a run")
        return {file.name: file for file in parts}
    location = locate(path)
    weights = {file.name: file for file in sorted(location.weights.glob(_WEIGHTS))}
    if not weights:
        raise CheckpointError(f"{path} has no safetensors", f"mlxlm convert {path} --out FOLDER first")
    others = {file.name: file for pattern in _FILES for file in sorted(location.root.glob(pattern))}
    others.pop(RUN_FILE, None)
    return {**others, **weights}
