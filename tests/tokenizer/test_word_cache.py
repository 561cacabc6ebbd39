"""Encoding by words gives the ids of the tokenizers library for any text."""

import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer import word_cache as module
from mlxlm.tokenizer.word_cache import WordCache, splits_at_words

TEXT = st.text(
    st.sampled_from(" \n\r\t\x0b\x1c\x85\u00a0\u3000.'/s12ab▁\u0301é京🎉<|>") | st.characters(exclude_categories=["Cs"])
)


def with_steps(tokenizer: Tokenizer, pre_tokenizer=None, normalizer=None, added=()) -> tokenizers.Tokenizer:
    runtime = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    runtime.pre_tokenizer = pre_tokenizer or runtime.pre_tokenizer
    if normalizer:
        runtime.normalizer = normalizer
    runtime.add_tokens(list(added))
    return runtime


def byte_level_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def check(runtime: tokenizers.Tokenizer, text: str) -> None:
    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in runtime.encode_batch(texts, add_special_tokens=False)]

    assert splits_at_words(runtime)
    assert WordCache(encode).encode_batch([text, text + "a", ""]) == encode([text, text + "a", ""])


@given(text=TEXT)
@example("a.\rb!\r\n c")
@example("a\n\nb.\n c \n\n d!\n/e\n")
@example(" \n\n  a  b\t c\r\nd ")
@settings(max_examples=60)
def test_equal_to_the_library(byte_level, sentencepiece_bpe, gpt2, text):
    check(sentencepiece_bpe._runtime, text)
    check(gpt2._runtime, text)
    for pattern in (module.WORD_PATTERN, module._QWEN, module._QWEN35):
        check(with_steps(byte_level, byte_level_split(pattern), normalizers.NFC()), text)
    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    check(with_steps(byte_level, pre_tokenizers.Sequence(digits)), text)


SPECIAL = st.sampled_from(
    ["<|user|>", "<|end|>", "<s>", "</s>", "<|pad|>", "<|end_of_text|>", "<|endoftext|>", " ", "\n"]
)


@given(parts=st.lists(TEXT | SPECIAL, max_size=8))
@settings(max_examples=60)
def test_special_tokens_in_a_text(byte_level, sentencepiece_bpe, gpt2, parts):
    text = "".join(parts)
    for tokenizer in (byte_level, sentencepiece_bpe, gpt2):
        for around in (False, True):
            [expected] = tokenizer._encode_by_library([text], around, parse_special=True)
            assert tokenizer.encode(text, add_special_tokens=around, parse_special=True) == expected


def test_special_tokens_around_a_text(byte_level, real_text):
    real_text = real_text[:20_000]
    for special in (False, True):
        expected = byte_level._runtime.encode(real_text, add_special_tokens=special).ids
        assert byte_level.encode(real_text, add_special_tokens=special) == expected


def test_other_tokenizers_are_left_to_the_library(byte_level, llama2):
    assert not splits_at_words(llama2._runtime)
    slash = module.WORD_PATTERN.replace(r"+[\r\n]*", r"+[\r\n/]*")
    for changes in (
        {"pre_tokenizer": byte_level_split(slash)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"normalizer": normalizers.Lowercase()},
        {"added": [AddedToken("two words", special=False)]},
        {"added": [AddedToken("<mask>", special=True, lstrip=True)]},
        {"added": [AddedToken("<e>", special=True, normalized=True)], "normalizer": normalizers.NFC()},
    ):
        assert not splits_at_words(with_steps(byte_level, **changes))
    runtime = with_steps(byte_level)
    runtime.model.dropout = 0.1
    assert not splits_at_words(runtime)


def test_the_cache_is_bounded(monkeypatch):
    calls = []
    cache = WordCache(lambda words: [calls.append(word) or [len(word)] for word in words])
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 10)
    for text in ("one two", "one two", "three four", "one"):
        assert sum(cache.encode_batch([text])[0]) == len(text)
    assert sorted(calls) == sorted(["one", " two", "three", " four", "one"])
