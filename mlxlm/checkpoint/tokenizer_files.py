"""Copy a checkpoint's tokenizer to a new model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxlm.checkpoint.checkpoint import AnyCheckpoint
from mlxlm.checkpoint.locations import locate
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError

FOLDER_FORMATS = ("safetensors", "pytorch")  # formats with the tokenizer's files in the same folder

# Hugging Face's files of tokenizers, chat templates and generation settings.
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def copy_tokenizer(checkpoint: AnyCheckpoint, folder: Path) -> list[str]:
    """Copy the source's tokenizer files to `folder`, or write the tokenizer of another format.

    Returns:
        A warning if the source has no tokenizer.

    Raises:
        TokenizerError: The tokenizer can't be read.
    """
    warnings = check_tokenizer(checkpoint)
    if checkpoint.format in FOLDER_FORMATS:
        root = locate(checkpoint.path).root
        for name in _FILES:
            if (root / name).is_file():
                shutil.copyfile(root / name, folder / name)  # the hub's cache has symbolic links
    elif not warnings:
        checkpoint.load_tokenizer().save(folder)
    return warnings


def check_tokenizer(checkpoint: AnyCheckpoint) -> list[str]:
    """Return a warning if the checkpoint has no tokenizer; raise TokenizerError if it has one that can't be read."""
    try:
        checkpoint.load_tokenizer()
    except MissingTokenizerError as error:
        return [f"the model has no tokenizer: {error.message}"]
    except TokenizerError as error:
        hint = "; ".join(filter(None, (error.hint, "remove the tokenizer's files to write the weights only")))
        raise TokenizerError(f"the tokenizer can't be read: {error.message}", hint) from error
    return []
