"""Limits on how much a tokenizer.json can lengthen a text, checked before the tokenizers library runs it.

The library allocates whatever the steps of a normalizer or decoder need, and aborts the process when memory is full.
Replace steps multiply: ten that each replace "a" by ten of them turn a letter into 10 GB. Lengths are UTF-8 bytes of
the compatibility decomposition (NFKD), which no other Unicode normal form lengthens.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from mlxlm.utils.errors import TokenizerError

_MAX_EXPANSION = 64  # factor; known tokenizers have up to about 10 by these bounds
_MAX_STEPS = 1000
_MAX_AFFIX = 256  # bytes of a prefix or suffix
_MAX_MAPPED = 64  # bytes for one character; known maps have up to 33
_MAX_ADDED = 1 << 26  # bytes of added tokens after normalization
_MAX_WORD = 10_000  # characters of a word in WordPiece, whose time is quadratic; the usual limit is 100
_NESTED = ("normalizers", "pretokenizers", "decoders")
# Factors. A byte becomes two and a word gets a leading space; Chinese characters get spaces on both sides; a word,
# which may be one letter, gets a leading U+2581.
_STEP_EXPANSION = {"ByteLevel": 3, "BertNormalizer": 3, "Metaspace": 4}
_HINT = "a tokenizer from a source that you trust"


def check_expansion(content: dict[str, Any], name: str) -> None:
    """Check the content of a tokenizer.json. Malformed fields are left to the library.

    Args:
        content: The parsed file.
        name: Name of the file, for error messages.

    Raises:
        TokenizerError: It could make a text many times longer; the message names the field.
    """
    expansion = 1.0
    for fields in (("normalizer", "pre_tokenizer"), ("decoder",)):
        steps = [(field, step) for field in fields for step in _steps(content.get(field))]
        if len(steps) > _MAX_STEPS:
            raise TokenizerError(f"{name}: {fields[0]} has {len(steps)} steps, the limit is {_MAX_STEPS}", _HINT)
        expansion = max(expansion, _expansion(steps, name))
    _check_affixes(content.get("model"), "model", name)
    added = content.get("added_tokens")
    texts = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if expansion * sum(map(_bytes, texts)) > _MAX_ADDED:
        raise TokenizerError(f"{name}: added_tokens are longer than {_MAX_ADDED} bytes after normalization", _HINT)


def _steps(spec: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in order, with sequences flattened."""
    pending = [spec]
    while pending:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        nested = [step[key] for key in _NESTED if isinstance(step.get(key), list)]
        for steps in nested:
            pending += reversed(steps)
        if not nested:
            yield step


def _expansion(steps: list[tuple[str, dict[str, Any]]], name: str) -> float:
    """An upper bound of the factor by which a text becomes longer."""
    expansion = 1.0
    inserted: set[str] | None = set()  # characters that steps inserted into the text; None for any
    num_maps = 0
    for field, step in steps:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            num_maps += 1
            if num_maps > 1 or _longest_mapped(step, name) > _MAX_MAPPED:
                raise TokenizerError(f"{name}: {field} maps characters to long texts", _HINT)
            inserted = None if inserted else inserted  # it can map inserted characters to any others
        elif kind in _STEP_EXPANSION:
            expansion, inserted = _STEP_EXPANSION[kind] * expansion, None
        elif kind == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            expansion, inserted = _after_replace(pattern["String"], step.get("content"), expansion, inserted)
        elif kind == "Replace" and isinstance(pattern, dict):
            expansion *= max(1, _bytes(step.get("content")) + (not _matches_a_character(pattern.get("Regex"))))
            inserted = None if inserted is None else inserted | set(_normalize(step.get("content")))
        _check_affixes(step, field, name)
        if expansion > _MAX_EXPANSION:
            raise TokenizerError(f"{name}: {field} can make a text more than {_MAX_EXPANSION} times as long", _HINT)
    return expansion


def _after_replace(old: str, new: Any, expansion: float, inserted: set[str] | None) -> tuple[float, set[str] | None]:
    """Expansion and inserted characters after a Replace step."""
    factor = _bytes(new) / max(1, _bytes(old)) if old else 1.0 + _bytes(new)
    if inserted is None or not old or inserted & set(_normalize(old)):
        expansion *= max(1.0, factor)
    else:  # no earlier step inserted what this one replaces
        expansion = max(expansion, factor)
    return expansion, None if inserted is None else inserted | set(_normalize(new))


def _matches_a_character(pattern: Any) -> bool:
    """Whether all matches of a regular expression are known to be non-empty."""
    if not isinstance(pattern, str) or re.search(r"\(\?|\\[bBAZzGKyY]|[$^]", pattern):
        return False
    try:
        return re.fullmatch(pattern, "") is None
    except (re.error, RecursionError, OverflowError):
        return False


def _longest_mapped(step: dict[str, Any], name: str) -> int:
    """Length of the longest text in a SentencePiece character map: a trie's size, the trie, NUL-terminated texts."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or b"")
    except (TypeError, ValueError):
        return 0
    size = int.from_bytes(data[:4], "little")
    if size > len(data) - 4:
        raise TokenizerError(f"{name}: precompiled_charsmap has {len(data)} bytes, its header needs {4 + size}")
    return max(map(len, data[4 + size :].split(b"\0")))


def _check_affixes(spec: Any, field: str, name: str) -> None:
    if not isinstance(spec, dict):
        return
    for key in ("prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        if _bytes(spec.get(key)) > _MAX_AFFIX:
            raise TokenizerError(f"{name}: {field}.{key} is longer than {_MAX_AFFIX} bytes", _HINT)
    max_chars = spec.get("max_input_chars_per_word")
    if isinstance(max_chars, int) and max_chars > _MAX_WORD:
        raise TokenizerError(f"{name}: {field}.max_input_chars_per_word is {max_chars}", f"at most {_MAX_WORD}")


def _normalize(text: Any) -> str:
    return unicodedata.normalize("NFKD", text).casefold() if isinstance(text, str) else ""


def _bytes(text: Any) -> int:
    return len(unicodedata.normalize("NFKD", text).encode("utf-8", "replace")) if isinstance(text, str) else 0
