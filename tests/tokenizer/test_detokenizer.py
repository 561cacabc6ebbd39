"""Streams of ids give the text that decoding them gives."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer.detokenizer import WindowDetokenizer

ANY = settings(max_examples=50)
IDS = st.lists(st.integers(0, 2**32), max_size=40)


def streamed(tokenizer, ids, skip_special_tokens=True):
    stream = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return "".join(map(stream.add_token, ids)) + stream.finalize()


@given(numbers=IDS)
@ANY
def test_streams_equal_decode(trained, numbers):
    ids = [n % (trained.vocab_size + 3) for n in numbers]
    for skip in (True, False):
        assert streamed(trained, ids, skip) == trained.decode(ids, skip_special_tokens=skip)


@given(numbers=IDS)
@ANY
def test_streams_equal_decode_in_llama2(llama2, numbers):
    ids = [n % 300 if n % 3 else n % llama2.vocab_size for n in numbers]  # many byte tokens
    assert streamed(llama2, ids) == llama2.decode(ids)


@pytest.fixture(scope="module")
def gpt2_runtime(gpt2):
    return tokenizers.Tokenizer.from_str(gpt2.to_json())


@given(numbers=IDS)
@ANY
def test_byte_level_decodes_like_the_tokenizers_library(gpt2, gpt2_runtime, numbers):
    ids = [n % 256 if n % 3 else n % gpt2.vocab_size for n in numbers]
    for skip in (True, False):
        assert gpt2.decode(ids, skip_special_tokens=skip) == gpt2_runtime.decode(ids, skip_special_tokens=skip)
    assert streamed(gpt2, ids) == gpt2.decode(ids)


def test_characters_are_complete(trained, sample):
    stream = trained.detokenizer()
    parts = [stream.add_token(id) for id in trained.encode(sample * 2)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == sample * 2
    assert stream.finalize() == ""


def test_an_incomplete_character_is_emitted_at_the_end(trained):
    ids = trained.encode("𐍈", add_special_tokens=False)  # four bytes, never seen in training
    stream = trained.detokenizer()
    assert [stream.add_token(id) for id in ids[:-1]] == ["", "", ""]
    assert stream.finalize() == "\ufffd"


def test_the_dummy_prefix_is_stripped_once(llama2):
    ids = llama2.encode("  two  spaces")
    assert streamed(llama2, ids) == "  two  spaces"
    assert streamed(llama2, llama2.encode("")) == ""


def word_piece():
    words = ["[UNK]", "[CLS]", "play", "##ing", "##ed", "the", ".", "do", "n't", "'", "s"]
    runtime = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    runtime.decoder = decoders.WordPiece()
    runtime.add_special_tokens(["[CLS]"])
    return Tokenizer(runtime, {"unk": "[UNK]", "bos": "[CLS]"})


@given(ids=st.lists(st.sampled_from([2, 3, 4, 5, 6]), max_size=20))
@ANY
def test_other_decoders_stream_through_a_window(ids):
    tokenizer = word_piece()
    assert tokenizer.tokenizer_type == "wordpiece"
    for skip in (True, False):
        assert streamed(tokenizer, [1, *ids], skip) == tokenizer.decode([1, *ids], skip_special_tokens=skip)


def test_a_window_holds_a_character_of_four_bytes():
    stream = WindowDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert [stream.add_token(byte) for byte in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]


def test_the_window_stays_small():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return "".join("\ufffd" if id % 7 else " word" for id in ids)

    stream = WindowDetokenizer(decode)
    for id in range(500):
        stream.add_token(id)
    stream.finalize()
    assert max(lengths) <= 2 * (WindowDetokenizer.MAX_CHARACTER_BYTES + 1)
