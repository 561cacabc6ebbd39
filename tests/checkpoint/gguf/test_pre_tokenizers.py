"""Pre-tokenizers by llama.cpp's names."""

from __future__ import annotations

import json

import pytest
import tokenizers

from mlxlm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer.word_cache import WORD_PATTERN
from mlxlm.utils.errors import TokenizerError
from tests.checkpoint.gguf.gguf_tokenizers import check


def with_pre_tokenizer(byte_level, name):
    """The same merges with another way to cut words."""
    pre, runtime = PRE_TOKENIZERS[name], tokenizers.Tokenizer.from_str(byte_level.to_json())
    runtime.model.ignore_merges = pre.ignore_merges
    runtime.pre_tokenizer = pre.pre_tokenizer()
    runtime.normalizer = pre.normalizer()
    return Tokenizer(runtime, byte_level.special_token_names)


@pytest.mark.parametrize("name", sorted({id(pre): name for name, pre in reversed(PRE_TOKENIZERS.items())}.values()))
def test_every_pre_tokenizer(name, byte_level, through, texts):
    tokenizer = with_pre_tokenizer(byte_level, name)
    matched, notes = find_pre_tokenizer(json.loads(tokenizer.to_json()))
    assert (PRE_TOKENIZERS[matched].steps, PRE_TOKENIZERS[matched].ignore_merges) == (
        PRE_TOKENIZERS[name].steps,
        PRE_TOKENIZERS[name].ignore_merges,
    )
    again, llama_cpp = through(tokenizer, notes=notes)
    assert again.fingerprint == tokenizer.fingerprint
    text = "\n".join(texts)
    assert again.encode(text) == tokenizer.encode(text)
    if notes:  # where llama.cpp is known to differ
        text = text.encode("ascii", "ignore").decode()
    check(tokenizer, again, llama_cpp, text)


def test_nfc_without_a_matching_name_is_noted(byte_level):
    model = json.loads(with_pre_tokenizer(byte_level, "gpt-2").to_json())
    model["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    name, notes = find_pre_tokenizer(model)
    assert name == "gpt-2" and "NFC" in notes[0]


def test_equivalent_spellings(byte_level):
    model = json.loads(byte_level.to_json())
    plain = model["pre_tokenizer"]["pretokenizers"][0]
    assert plain["pattern"]["Regex"] == WORD_PATTERN
    for behavior, invert in (("Isolated", False), ("Removed", True)):
        plain |= {"behavior": behavior, "invert": invert}
        assert find_pre_tokenizer(model) == ("smaug-bpe", [])
    plain["pattern"]["Regex"] = WORD_PATTERN.replace(r"\r\n", "\r\n")  # the characters instead of their escapes
    assert find_pre_tokenizer(model) == ("smaug-bpe", [])
    plain |= {"behavior": "Removed", "invert": False}
    with pytest.raises(TokenizerError, match="splits text"):
        find_pre_tokenizer(model)
