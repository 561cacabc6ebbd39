"""Encoding by words, each of which the tokenizers library encodes once.

Text repeats its words. To look up the ids of a word is several times faster than to let the library split and merge it
again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

# Pre-tokenization of byte-level BPE, after OpenAI's cl100k_base (tiktoken, openai_public.py) and Llama 3: contractions,
# letters with one leading mark or space, up to three digits, punctuation with line ends, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def word_pattern(space: str) -> str:
    """Pre-tokenization of SentencePiece models: words with the spaces before them, and line ends."""
    return rf"\n|{space}+[^{space}\n]*|[^{space}\n]+"


_QWEN = WORD_PATTERN.replace("{1,3}", "")
_QWEN35 = _QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_PATTERNS = {WORD_PATTERN, _QWEN, _QWEN35, word_pattern(" ")}

# A word ends before a space if the character before it isn't whitespace, and after one line end between two characters
# that aren't. With `_PATTERNS` and GPT-2's, tokens end there too, and depend on nothing beyond. (Those of GPT-4o don't:
# a slash can follow a line end.)
_WORD = re.compile(r"\s*+\S++(?:(?! )\s++(?:(?<!\S\n)\S++)?)*+|\s++")
_MAX_CHARACTERS = 1 << 20  # of the words in a cache: 150,000 words of English, 40 MB


class WordCache:
    """Encodes texts by words, of which it keeps the ids.

    Args:
        encode: Encodes a batch of texts without special tokens.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]]):
        self._encode = encode
        self._ids: dict[str, list[int]] = {}
        self._characters = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens. Several threads can do so at a time."""
        if self._characters > _MAX_CHARACTERS:
            self._ids, self._characters = {}, 0
        known = self._ids  # another thread may replace it, but nothing is removed from it
        split = [_WORD.findall(text) for text in texts]
        if new := list(set().union(*split).difference(known)):
            known.update(zip(new, self._encode(new), strict=True))
            self._characters += sum(map(len, new))
        return [list(chain.from_iterable(map(known.__getitem__, words))) for words in split]


def splits_at_words(runtime: tokenizers.Tokenizer) -> bool:
    """Whether the ids of a text without special tokens are those of its words, one after the other.

    Special tokens, if they are parsed, are not part of the texts around them.
    """
    normalizer = runtime.normalizer and json.loads(runtime.normalizer.__getstate__())["type"]
    if runtime.pre_tokenizer is None or normalizer not in (None, "NFC"):
        return False
    if not isinstance(runtime.model, models.BPE) or runtime.model.dropout:
        return False
    spec = json.loads(runtime.pre_tokenizer.__getstate__())
    steps = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    return (
        all(map(_splits_alike, steps))
        and any(step["type"] == "Split" or step.get("use_regex") for step in steps)
        and all(_is_exact(token, normalizer) for token in runtime.get_added_tokens_decoder().values())
    )


def _is_exact(token: AddedToken, normalizer: str | None) -> bool:
    """Whether a token is special, and stands for its text alone, wherever that is."""
    has_sides = token.lstrip or token.rstrip or token.single_word
    return token.special and not has_sides and not (normalizer and token.normalized)


def _splits_alike(step: dict[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer splits a text as it splits its words."""
    if step["type"] == "Split":
        return step["pattern"].get("Regex") in _PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
    return step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
