"""Prompts for training with a reward function: JSON lines with "prompt" and what the function needs to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlxlm.data.manifest import MANIFEST_FILE, SPLITS
from mlxlm.data.options import DataOptions
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import write_bytes
from mlxlm.utils.json_files import json_line, read_json, read_json_lines, write_json

_EXAMPLE = '{"prompt": "What is 2 + 2?", "answer": "4"} on each line'


class PromptRecord(NamedTuple):
    """A prompt.

    Attributes:
        location: File and line, for error messages.
        prompt: A text, or the messages of a conversation, each a dict with "role" and "content".
        fields: The other fields of its line.
    """

    location: str
    prompt: str | list[Any]
    fields: dict[str, Any]


def read_prompts(paths: Iterable[str | Path]) -> list[PromptRecord]:
    """Read prompts from files of JSON lines: a text or messages as "prompt", and any other fields.

    Raises:
        DataError: A line is malformed or has no prompt, which the message names; or there is no line.
    """
    prompts: list[PromptRecord] = []
    for path in paths:
        before = len(prompts)
        for _, location, fields in read_json_lines(path, DataError, _EXAMPLE):
            prompt = fields.pop("prompt", None)
            if not prompt or not isinstance(prompt, str | list):
                raise DataError(f"{location} has no 'prompt', a text or a list of messages", _EXAMPLE)
            prompts.append(PromptRecord(location, prompt, fields))
        if len(prompts) == before:
            raise DataError(f"{path} has no prompts", _EXAMPLE)
    return prompts


def split_prompts(data: DataOptions, seed: int) -> dict[str, list[PromptRecord]]:
    """Read the prompts of `data.sources`, and hold out `data.validation`, or `data.validation_fraction` of them.

    Returns:
        The prompts of "train" and "validation".

    Raises:
        DataError: As `read_prompts`; or nothing is left to train on or held out.
    """
    prompts = read_prompts(data.sources)
    if data.validation:
        return dict(zip(SPLITS, (prompts, read_prompts(data.validation)), strict=True))
    count = max(1, round(data.validation_fraction * len(prompts))) if data.validation_fraction else 0
    if not 0 < count < len(prompts):
        problem = f"{count} of {len(prompts)} prompts are held out for validation"
        raise DataError(problem, "more prompts, `validation=FILE`, or another `validation_fraction`")
    held_out = set(np.random.default_rng(seed).permutation(len(prompts))[:count].tolist())
    parts = ([p for i, p in enumerate(prompts) if (i in held_out) == held] for held in (False, True))
    return dict(zip(SPLITS, parts, strict=True))


def write_prompts(folder: Path, splits: dict[str, list[PromptRecord]]) -> None:
    """Write the prompts of each split into `folder`, with a manifest that has their number and digest."""
    manifest: dict[str, Any] = {}
    for split, prompts in splits.items():
        file = _file(folder, split)
        write_bytes(file, b"".join(json_line(prompt._asdict()) for prompt in prompts), DataError)
        manifest[split] = {"documents": len(prompts), "sha256": file_sha256(file, DataError)}
    write_json(folder / MANIFEST_FILE, manifest)


def load_prompts(folder: Path, split: str) -> list[PromptRecord]:
    """Read the prompts of a split that `write_prompts` has written. Raises DataError if they can't be read."""
    lines = read_json_lines(_file(folder, split), DataError)
    try:
        return [PromptRecord(**fields) for _, _, fields in lines]
    except TypeError:
        raise DataError(f"{_file(folder, split)} has other fields than it was written with", "a new run") from None


def verify_prompts(folder: Path, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Compare the prompts in `folder` with their digests. Raises DataError if one differs or can't be read."""
    manifest = read_json(folder / MANIFEST_FILE, error_type=DataError)
    for split in SPLITS:
        digest = file_sha256(_file(folder, split), DataError, should_stop)
        if digest is not None and digest != manifest[split]["sha256"]:
            problem = f"{_file(folder, split)} has changed: its SHA-256 is not the one in {MANIFEST_FILE}"
            raise DataError(problem, "an unchanged copy of this file, or a new run")


def prompt_order(count: int, first: int, number: int, seed: int) -> list[int]:
    """Return the indices of `number` prompts, from position `first` of endless epochs, each in an order of its own."""
    positions = range(first, first + number)
    epochs = {
        epoch: np.random.default_rng([seed, epoch]).permutation(count)
        for epoch in range(first // count, (first + number - 1) // count + 1)
    }
    return [int(epochs[position // count][position % count]) for position in positions]


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.jsonl"
