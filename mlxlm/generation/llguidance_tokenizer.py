"""Tokenizers in the form that llguidance needs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlxlm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@lru_cache(maxsize=4)  # making one takes 0.2 s for 32,000 tokens
def llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The tokenizer for llguidance. See `Grammar.compile`."""
    import llguidance

    eos_ids = sorted(id for id in eos_token_ids if id < vocab_size)
    tokens = [tokenizer.token_bytes(id, skip_special_tokens=False) for id in range(vocab_size)]
    # The byte 0xFF, which no UTF-8 has, marks special tokens in llguidance: a token of it would match their first byte.
    tokens = [b"" if b"\xff" in token else token for token in tokens]
    for id in eos_ids:
        tokens[id] = b""
    if not eos_ids:  # llguidance needs one: an id beyond the logits
        eos_ids = [vocab_size]
        tokens.append(b"")
    special_ids = {id for id in tokenizer.special_tokens.values() if id < vocab_size}
    wrapper: Any = _TokenizerWrapper(tokenizer, tokens, eos_ids, special_ids.union(eos_ids))
    return llguidance.LLTokenizer(wrapper, eos_token=eos_ids)


class _TokenizerWrapper:
    """The interface that llguidance expects of a tokenizer.

    Special tokens match no text; a grammar allows them by their names (if they are in angle brackets) or ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_ids: list[int], special_ids: set[int]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, sorted(special_ids), eos_ids[0]
        self._tokenizer = tokenizer
        self._ids = {text: id for id, text in reversed(list(enumerate(tokens))) if text and id not in special_ids}
        self._max_length = max(map(len, tokens), default=0)

    def __call__(self, text: str) -> list[int]:
        """Encode text that must follow: with the tokenizer, unless that normalizes it, else greedily."""
        ids, content = self._tokenizer.encode(text, continues=True), text.encode("utf-8")
        if b"".join(self.tokens[id] for id in ids) == content:
            return ids
        ids, start = [], 0
        while start < len(content):
            ends = range(min(len(content), start + self._max_length), start, -1)
            end = next((end for end in ends if content[start:end] in self._ids), None)
            if end is None:  # no token has this byte: llguidance finds that nothing can follow
                break
            ids.append(self._ids[content[start:end]])
            start = end
        return ids
