"""Prompts for the text between a prefix and a suffix."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import normalizers

from mlxlm.tokenizer import FillInTheMiddle, Tokenizer
from mlxlm.utils.errors import TextTooLongError, TokenizerError

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def with_tokens(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """The same tokenizer with further special tokens."""
    runtime = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    runtime.add_special_tokens(tokens)
    return Tokenizer(runtime, tokenizer.special_token_names)


@pytest.mark.parametrize(
    "tokens",
    [QWEN, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]],
)
def test_prefix_suffix_middle(byte_level, tokens):
    tokenizer = with_tokens(byte_level, tokens)
    before, after, middle = map(tokenizer.token_id, tokens)
    encode = FillInTheMiddle(tokenizer).encode
    bos, prefix = tokenizer.encode("def f(")[0], tokenizer.encode("def f(")[1:]
    suffix, start = (tokenizer.encode(text, continues=True) for text in ("):\n", "a"))
    assert encode("def f(", "):\n") == [bos, before, *prefix, after, *suffix, middle]
    assert encode("def f(", "):\n", "a") == [bos, before, *prefix, after, *suffix, middle, *start]
    assert encode("", "") == [bos, before, after, middle]
    assert {before, after, middle} <= FillInTheMiddle(tokenizer).end_token_ids


def test_codestral_has_the_suffix_first(byte_level):
    tokenizer = with_tokens(byte_level, ["[PREFIX]", "[SUFFIX]"])
    before, after = tokenizer.token_id("[PREFIX]"), tokenizer.token_id("[SUFFIX]")
    bos, prefix = tokenizer.encode("a")
    [suffix] = tokenizer.encode("b", continues=True)
    assert FillInTheMiddle(tokenizer).encode("a", "b") == [bos, after, suffix, before, prefix]


def test_a_suffix_has_no_dummy_prefix(sentencepiece_bpe):
    tokens = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    runtime = tokenizers.Tokenizer.from_str(sentencepiece_bpe.to_json())
    runtime.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = with_tokens(Tokenizer(runtime, sentencepiece_bpe.special_token_names), tokens)
    assert tokenizer.adds_dummy_prefix
    before, after, middle, end = map(tokenizer.token_id, tokens)
    prefix, suffix = tokenizer.encode("def"), tokenizer.encode("return", continues=True)
    assert prefix[0] == tokenizer.bos_token_id
    expected = [prefix[0], before, *prefix[1:], after, *suffix, middle]
    assert FillInTheMiddle(tokenizer).encode("def", "return") == expected
    assert end in FillInTheMiddle(tokenizer).end_token_ids


def test_special_tokens_in_the_texts_are_text(byte_level):
    tokenizer = with_tokens(byte_level, QWEN)
    ids = FillInTheMiddle(tokenizer).encode("<|fim_middle|>", "<|fim_middle|>")
    assert ids.count(tokenizer.token_id("<|fim_middle|>")) == 1


def test_other_files_come_first(byte_level):
    tokenizer = with_tokens(byte_level, [*QWEN, "<|file_sep|>"])
    separator = tokenizer.token_id("<|file_sep|>")
    ids = FillInTheMiddle(tokenizer).encode("a", "b", files=[("one.py", "x = 1"), ("two.py", "y")])
    assert ids.index(separator) == 1 and ids.count(separator) == 3
    assert tokenizer.decode(ids[1:], skip_special_tokens=False).startswith(
        "<|file_sep|>one.py\nx = 1\n<|file_sep|>two.py"
    )
    plain = with_tokens(byte_level, QWEN)
    ids = FillInTheMiddle(plain).encode("a", "b", files=[("one.py", "x = 1")])
    assert plain.decode(ids[1:], skip_special_tokens=False).startswith("one.py\nx = 1\n<|fim_prefix|>a")


def test_long_texts(byte_level):
    encode = FillInTheMiddle(with_tokens(byte_level, QWEN)).encode
    for texts in ({"prefix": "a " * 999}, {"suffix": "a " * 999}, {"files": [("a", "a " * 60)] * 9}):
        with pytest.raises(TextTooLongError):
            encode(**{"prefix": "", "suffix": "", **texts}, max_length=100)


def test_other_tokenizers(byte_level):
    with pytest.raises(TokenizerError, match="can't fill in the middle"):
        FillInTheMiddle(byte_level)
