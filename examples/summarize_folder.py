"""Summarize every text file of a folder, many at once.

    python examples/summarize_folder.py my-model notes/ --pattern "*.md" --sentences 2

A file that doesn't fit in the model's context is cut to its beginning.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlxlm

MAX_TOKENS = 120


def shorten(text: str, lm: mlxlm.generation.LoadedModel) -> str:
    """The beginning of a text that leaves half of the context for the question and the answer."""
    ids = lm.tokenizer.encode(text, add_special_tokens=False)
    return lm.tokenizer.decode(ids[: lm.config.max_position_embeddings // 2])


def main() -> None:
    """Print a summary of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pattern", default="*.txt")
    parser.add_argument("--sentences", type=int, default=1)
    options = parser.parse_args()

    paths = sorted(path for path in options.folder.rglob(options.pattern) if path.is_file())
    lm = mlxlm.load(options.model)
    task = f"Summarize this text in {options.sentences} short sentence(s)."
    questions = [
        [{"role": "user", "content": f"{task}\n\n{shorten(path.read_text(errors='replace'), lm)}"}] for path in paths
    ]
    results = mlxlm.batch(lm, messages=questions, temperature=0, max_tokens=MAX_TOKENS) if paths else []
    for path, result in zip(paths, results, strict=True):
        print(f"{path.relative_to(options.folder)}: {' '.join(result.text.split())}")


if __name__ == "__main__":
    main()
