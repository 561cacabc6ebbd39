"""The tokenizer of a checkpoint goes along with its weights, file by file where the source has files of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxlm.checkpoint.layout import locate
from mlxlm.checkpoint.source import Checkpoint
from mlxlm.errors import TokenizerError

FOLDERS = ("safetensors", "pytorch")  # formats whose files lie in one folder with those of the tokenizer

# Every file that a tokenizer, a chat template or generation settings can be in, as Hugging Face names them.
FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def carry_tokenizer(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Give the model in `folder` the source's tokenizer files as they are, or a tokenizer rebuilt out of another
    format. Returns warnings: where there is none that mlxlm can read."""
    if checkpoint.format in FOLDERS:
        root = locate(checkpoint.path).root
        for name in FILES:
            if (root / name).is_file():
                shutil.copyfile(root / name, folder / name)  # what a hub's folder has are links
    try:
        tokenizer = checkpoint.load_tokenizer()
    except TokenizerError as error:
        return [f"mlxlm can't read the tokenizer: {error.message}"]
    if checkpoint.format not in FOLDERS:
        tokenizer.save(folder)
    return []
