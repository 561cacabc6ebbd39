"""Round trips of tokenizers."""

from __future__ import annotations

# Prose, code, numbers, accents, CJK, emoji, odd spaces; no U+2581, which SentencePiece can't tell from a space.
SAMPLE = (
    "The quick brown fox didn't jump over 13 lazy dogs; it cost $1,234.56 in 2024.\n\n"
    "def fibonacci(n):\n    if n < 2:\n        return n\n\treturn fibonacci(n - 1) + fibonacci(n - 2)\r\n"
    "Ça coûte très cher, naïve façade. 東京都は日本の首都です。 Привет, мир! \u200bשלום DON'T We'll\n"
    "👩‍👩‍👧 🎉🎉 e\u0301 \u00a0 \u3000 ½ ² \x07\x7f …—“quotes”    \n   \n end"
)


def check(tokenizer, again, llama_cpp, text):
    ids = tokenizer.encode(text)
    assert again.encode(text) == ids
    assert (
        again.special_token_names == tokenizer.special_token_names and again.special_tokens == tokenizer.special_tokens
    )
    assert again.decode(ids) == tokenizer.decode(ids)
    assert llama_cpp(text) == ids
