"""Training: special tokens, vocabulary sizes, unusual texts."""

import os

import pytest

from mlxlm.tokenizer import TOKENIZER_TYPES, train
from mlxlm.utils.errors import DataError, TokenizerError

COMMON_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@pytest.mark.parametrize(
    ("fixture", "tokenizer_type", "own", "ids"),
    [
        ("byte_level", "byte-level", ["<|begin_of_text|>", "<|end_of_text|>"], [0, 1, 2, None]),
        ("sentencepiece_bpe", "sentencepiece", ["<unk>", "<s>", "</s>"], [1, 2, 3, 0]),
    ],
)
def test_special_tokens(request, fixture, tokenizer_type, own, ids):
    tokenizer = request.getfixturevalue(fixture)
    assert tokenizer.tokenizer_type == tokenizer_type and tokenizer.vocab_size == 420
    assert list(tokenizer.special_tokens) == [*own, *COMMON_TOKENS]
    assert [getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "unk")] == ids


def test_the_same_text_gives_the_same_tokenizer_without_output_or_files(trained, corpus, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert train(iter(corpus), 420, trained.tokenizer_type).fingerprint == trained.fingerprint
    assert train(corpus, 419, trained.tokenizer_type).fingerprint != trained.fingerprint
    assert os.listdir(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_bos_comes_first(trained):
    ids = trained.encode("water")
    assert ids[0] == trained.bos_token_id
    assert ids[1:] == trained.encode("water", add_special_tokens=False)


def test_frequent_words_become_single_tokens(trained):
    assert len(trained.encode(" token", add_special_tokens=False)) == 1


def test_a_word_that_occurs_once_gets_no_token_of_its_own():
    """Of bytes, special tokens, and " water" with its four parts."""
    tokenizer = train(["water water " * 20 + "zyxwv"], 300, "byte-level", exact=False)
    assert tokenizer.vocab_size == 256 + 7 + 5
    assert len(tokenizer.encode("zyxwv", add_special_tokens=False)) == 5


def test_digits_are_split(corpus):
    numbers = ["1234567 " * 500]
    sentencepiece = train(numbers, 272, "sentencepiece")
    assert len(sentencepiece.encode("1234567", add_special_tokens=False)) == 7
    byte_level = train(numbers, 267, "byte-level")
    assert len(byte_level.encode("1234567", add_special_tokens=False)) == 3


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_the_error_for_a_large_vocabulary_names_the_largest(tokenizer_type, corpus):
    with pytest.raises(TokenizerError, match="larger than this text supports") as caught:
        train(corpus, 100_000, tokenizer_type)
    largest = int(caught.value.hint.split()[4])
    assert train(corpus, largest, tokenizer_type).vocab_size == largest


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
@pytest.mark.parametrize("text", ["The cat sat on the mat.\n" * 500, "a" * 10_000, "Hello there."])
def test_without_exact_the_vocabulary_fits_the_text(tokenizer_type, text):
    trained = train([text], 1024, tokenizer_type, exact=False)
    assert 256 < trained.vocab_size < 1024 and trained.decode(trained.encode(text)) == text
    assert train([text], trained.vocab_size, tokenizer_type).fingerprint == trained.fingerprint


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_the_error_for_a_small_vocabulary_names_the_smallest(tokenizer_type, corpus):
    with pytest.raises(TokenizerError, match="too small") as caught:
        train(corpus, 100, tokenizer_type)
    smallest = int(caught.value.hint.split()[-1])
    if tokenizer_type == "sentencepiece":  # the text's own characters come on top
        with pytest.raises(TokenizerError, match="this text's characters") as caught:
            train(corpus, smallest, tokenizer_type)
        smallest = int(caught.value.hint.split()[-1])
    assert train(corpus, smallest, tokenizer_type).vocab_size == smallest


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
@pytest.mark.parametrize("texts", [[], [""], [" \n\t "]])
def test_no_text(tokenizer_type, texts):
    with pytest.raises(TokenizerError, match="no text"):
        train(texts, 300, tokenizer_type)


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_errors_of_the_texts_are_raised(tokenizer_type):
    def texts():
        yield "some text\n"
        raise DataError("line 2 is bad", "another line")

    with pytest.raises(DataError, match="line 2 is bad"):
        train(texts(), 300, tokenizer_type)


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_lone_surrogates(tokenizer_type):
    with pytest.raises(TokenizerError, match=r"U\+D800 at character 3"):
        train(["abc\ud800"], 300, tokenizer_type)


def test_unknown_type_and_huge_vocabulary(corpus):
    with pytest.raises(TokenizerError, match="unknown tokenizer type"):
        train(corpus, 400, "unigram")
    with pytest.raises(TokenizerError, match="too large"):
        train(corpus, 10**9)


def test_sentencepiece_learns_from_long_lines():
    tokenizer = train(["water " * 20_000], 280, "sentencepiece")
    assert len(tokenizer.encode(" water", add_special_tokens=False)) == 1
