"""How much longer a tokenizer.json can make a text or a token, found before the tokenizers library runs any of it.

The library allocates whatever the steps of a normalizer or decoder ask for, and aborts the process where memory ends. A
chain of Replace steps multiplies: ten that each replace "a" by ten of them turn a letter into 10 GB. Lengths are UTF-8
bytes of the compatibility decomposition (NFKD), which Unicode's own normal forms then don't increase.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from mlxlm.utils.errors import TokenizerError

_LARGEST_GROWTH = 64  # times; those in use have up to about 10, by these bounds
_MOST_STEPS = 1000
_LONGEST_AFFIX = 256  # bytes of what is put in front of or behind a word
_LONGEST_MAPPED = 64  # bytes; the longest in use, of one character, has 33
_MOST_ADDED = 1 << 26  # bytes of added tokens after normalization
_MOST_CHARACTERS = 10_000  # of a word that WordPiece takes time by the square for; it has 100
_INNER = ("normalizers", "pretokenizers", "decoders")
# Times as long: a byte becomes two and a piece gets a space in front; Chinese characters get spaces around them;
# a piece, which may be one letter, gets U+2581 in front.
_FIXED = {"ByteLevel": 3, "BertNormalizer": 3, "Metaspace": 4}
_HINT = "a tokenizer from a source that you trust"


def check_expansion(content: dict[str, Any], name: str) -> None:
    """Raises TokenizerError, naming the file `name` and the field, where the tokenizer.json `content` could make a text
    many times as long as it was. What isn't of the shape that the library reads is left to the library."""
    grown = 1.0
    for fields in (("normalizer", "pre_tokenizer"), ("decoder",)):
        steps = [(field, step) for field in fields for step in _steps(content.get(field))]
        if len(steps) > _MOST_STEPS:
            raise TokenizerError(f"{name}: {fields[0]} has {len(steps)} steps, at most {_MOST_STEPS} are read", _HINT)
        grown = max(grown, _growth(steps, name))
    _check_affixes(content.get("model"), "model", name)
    added = content.get("added_tokens")
    texts = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if grown * sum(map(_bytes, texts)) > _MOST_ADDED:
        raise TokenizerError(f"{name}: added_tokens are longer than {_MOST_ADDED} bytes after normalization", _HINT)


def _steps(spec: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in their order, those of sequences in their place."""
    waiting = [spec]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        inner = [step[key] for key in _INNER if isinstance(step.get(key), list)]
        for steps in inner:
            waiting += reversed(steps)
        if not inner:
            yield step


def _growth(steps: list[tuple[str, dict[str, Any]]], name: str) -> float:
    """An upper bound of how many times as long a text becomes."""
    grown = 1.0
    made: set[str] | None = set()  # characters that steps have put into the text; None for any
    mapped = 0
    for field, step in steps:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            mapped += 1
            if mapped > 1 or _longest_mapped(step, name) > _LONGEST_MAPPED:
                raise TokenizerError(f"{name}: {field} maps characters to long texts", _HINT)
            made = None if made else made  # after other steps it can make any character of theirs
        elif kind in _FIXED:
            grown, made = _FIXED[kind] * grown, None
        elif kind == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            grown, made = _replaced(pattern["String"], step.get("content"), grown, made)
        elif kind == "Replace" and isinstance(pattern, dict):
            grown *= max(1, _bytes(step.get("content")) + (not _takes_a_character(pattern.get("Regex"))))
            made = None if made is None else made | set(_plain(step.get("content")))
        _check_affixes(step, field, name)
        if grown > _LARGEST_GROWTH:
            raise TokenizerError(
                f"{name}: {field} can make a text more than {_LARGEST_GROWTH} times as long as it was", _HINT
            )
    return grown


def _replaced(old: str, new: Any, grown: float, made: set[str] | None) -> tuple[float, set[str] | None]:
    """Growth and made characters after each `old` has become `new`."""
    factor = _bytes(new) / max(1, _bytes(old)) if old else 1.0 + _bytes(new)
    if made is None or not old or made & set(_plain(old)):
        grown *= max(1.0, factor)
    else:  # what is replaced has not grown before
        grown = max(grown, factor)
    return grown, None if made is None else made | set(_plain(new))


def _takes_a_character(pattern: Any) -> bool:
    """Whether every match of a regular expression is known to have a character or more."""
    if not isinstance(pattern, str) or re.search(r"\(\?|\\[bBAZzGKyY]|[$^]", pattern):
        return False
    try:
        return re.fullmatch(pattern, "") is None
    except (re.error, RecursionError, OverflowError):
        return False


def _longest_mapped(step: dict[str, Any], name: str) -> int:
    """Of a SentencePiece character map: the size of a trie, the trie, and texts that end with NUL."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or b"")
    except (TypeError, ValueError):
        return 0
    size = int.from_bytes(data[:4], "little")
    if size > len(data) - 4:
        raise TokenizerError(f"{name}: precompiled_charsmap has {len(data)} bytes, by its header {4 + size} or more")
    return max(map(len, data[4 + size :].split(b"\0")))


def _check_affixes(spec: Any, field: str, name: str) -> None:
    if not isinstance(spec, dict):
        return
    for key in ("prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        if _bytes(spec.get(key)) > _LONGEST_AFFIX:
            raise TokenizerError(f"{name}: {field}.{key} is longer than {_LONGEST_AFFIX} bytes", _HINT)
    most = spec.get("max_input_chars_per_word")
    if isinstance(most, int) and most > _MOST_CHARACTERS:
        raise TokenizerError(f"{name}: {field}.max_input_chars_per_word is {most}", f"at most {_MOST_CHARACTERS}")


def _plain(text: Any) -> str:
    return unicodedata.normalize("NFKD", text).casefold() if isinstance(text, str) else ""


def _bytes(text: Any) -> int:
    return len(unicodedata.normalize("NFKD", text).encode("utf-8", "replace")) if isinstance(text, str) else 0
