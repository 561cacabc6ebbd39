"""Limits on how much a tokenizer.json can lengthen a text, checked before the tokenizers library runs it.

The library allocates whatever the steps of a normalizer or decoder need, and aborts the process when memory is full.
Replace steps multiply: ten that each replace "a" by ten of them turn a letter into 10 GB. Lengths are UTF-8 bytes of
the compatibility decomposition (NFKD), which no other Unicode normal form lengthens.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Iterator
from typing import Any

from mlxlm.utils.errors import TokenizerError

_MAX_EXPANSION = 64  # factor; known tokenizers have up to about 30 by these bounds
_MAX_AFFIX = 256  # bytes of a prefix or suffix
_MAX_MAPPED = 64  # bytes for one character; known maps have up to 33
_MAX_ADDED = 1 << 26  # bytes of added tokens after normalization
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
    expansion = max(_expansion(content, fields, name) for fields in (("normalizer", "pre_tokenizer"), ("decoder",)))
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


def _expansion(content: dict[str, Any], fields: tuple[str, ...], name: str) -> float:
    """An upper bound of the factor by which the steps in these fields make a text longer."""
    expansion, num_maps = 1.0, 0
    steps = [(field, step) for field in fields for step in _steps(content.get(field))]
    for field, step in steps:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            num_maps += 1
            if num_maps > 1 or _longest_mapped(step, name) > _MAX_MAPPED:
                raise TokenizerError(f"{name}: {field} maps characters to long texts", _HINT)
        elif kind == "Replace" and isinstance(pattern, dict):
            old, new = _bytes(pattern.get("String")), _bytes(step.get("content"))
            expansion *= max(1, new / old if old else 1 + new)  # a regular expression may match between characters
        else:
            expansion *= _STEP_EXPANSION.get(str(kind), 1)
        _check_affixes(step, field, name)
        if expansion > _MAX_EXPANSION:
            raise TokenizerError(f"{name}: {field} can make a text more than {_MAX_EXPANSION} times as long", _HINT)
    return expansion


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
    for key in ("prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(spec, dict) and _bytes(spec.get(key)) > _MAX_AFFIX:
            raise TokenizerError(f"{name}: {field}.{key} is longer than {_MAX_AFFIX} bytes", _HINT)


def _bytes(text: Any) -> int:
    return len(unicodedata.normalize("NFKD", text).encode("utf-8", "replace")) if isinstance(text, str) else 0
