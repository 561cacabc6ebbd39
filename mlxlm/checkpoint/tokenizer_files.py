"""The tokenizer of a checkpoint goes along with its weights, file by file where the source has files of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.locations import locate
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError

FOLDER_FORMATS = ("safetensors", "pytorch")  # formats whose files lie in one folder with those of the tokenizer

# Every file that a tokenizer, a chat template or generation settings can be in, as Hugging Face names them.
FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Give the model in `folder` the source's tokenizer files as they are, or a tokenizer rebuilt out of another
    format. Returns warnings: where the source has none.

    Raises TokenizerError for one that can't be read: see `check_tokenizer`.
    """
    warnings = check_tokenizer(checkpoint)
    if checkpoint.format in FOLDER_FORMATS:
        root = locate(checkpoint.path).root
        for name in FILES:
            if (root / name).is_file():
                shutil.copyfile(root / name, folder / name)  # what a hub's folder has are links
    elif not warnings:
        checkpoint.load_tokenizer().save(folder)
    return warnings


def check_tokenizer(checkpoint: Checkpoint) -> list[str]:
    """A warning where the checkpoint has no tokenizer. Raises TokenizerError where it has one that can't be read, since
    a copy of the model would be of no use, either."""
    try:
        checkpoint.load_tokenizer()
    except MissingTokenizerError as error:
        return [f"the model has no tokenizer: {error.message}"]
    except TokenizerError as error:
        hint = "; ".join(filter(None, (error.hint, "move the tokenizer's files away to write the weights alone")))
        raise TokenizerError(f"the tokenizer can't be read: {error.message}", hint) from error
    return []
