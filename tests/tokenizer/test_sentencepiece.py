"""Ids are those of sentencepiece's encoder."""

import io
import time

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.tokenizer import load
from mlxlm.utils.errors import TokenizerError

TEXT = st.text(
    st.sampled_from(" \n\r\t,.aetohinsr01'-=_漢字🎉é\u00a0\u3000\0▁<s>") | st.characters(exclude_categories=["Cs"]),
    max_size=60,
)
ANY = settings(max_examples=60)
RUNS = [" " * n for n in range(1, 40)] + ["=" * 33, "-" * 77, "\n" * 9, "aaaa" * 9, "haha" * 9, "hahah 00000", "\t\t "]


@pytest.fixture(scope="session")
def llama2_reference(llama2_folder):
    return sentencepiece.SentencePieceProcessor(model_file=str(llama2_folder / "tokenizer.model"))


@pytest.fixture(scope="session")
def ours_reference(sentencepiece_bpe):
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bpe.sentencepiece_model)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@given(text=TEXT)
@ANY
def test_llama2_on_any_text(llama2, llama2_reference, text):
    assert ids(llama2, text) == llama2_reference.encode(text)


@given(text=TEXT)
@ANY
def test_a_trained_model_on_any_text(sentencepiece_bpe, ours_reference, text):
    text = text.replace("▁", "")  # sentencepiece would return it as a space; ours keeps it
    assert ids(sentencepiece_bpe, text) == ours_reference.encode(text)


def test_real_text(llama2, llama2_reference, sentencepiece_bpe, ours_reference, real_text):
    assert ids(llama2, real_text) == llama2_reference.encode(real_text)
    assert ids(sentencepiece_bpe, real_text) == ours_reference.encode(real_text)


def test_runs(llama2, llama2_reference, sentencepiece_bpe, ours_reference):
    texts = [padded for text in RUNS for padded in (text, f"x{text}", f"{text}y", f"x{text}y{text}")]
    assert [ids(llama2, text) for text in texts] == llama2_reference.encode(texts)
    assert [ids(sentencepiece_bpe, text) for text in texts] == ours_reference.encode(texts)


@pytest.mark.parametrize("unit", ["a", "abcdefgh12", " ", "漢字", "=-"])
def test_time_is_not_quadratic_on_runs(llama2, unit):
    def seconds(size):
        text = unit * (size // len(unit))
        best = float("inf")
        for _ in range(2):
            started = time.process_time()
            llama2.encode(text)
            best = min(best, time.process_time() - started)
        return best

    # 16 times the text; quadratic would be 256 times the time
    assert seconds(160_000) < 80 * max(seconds(10_000), 0.001)


OTHER_SETTINGS = {
    "defaults but for normalization": {},
    "no byte fallback": {"byte_fallback": False},
    "byte fallback and squeezed spaces": {"byte_fallback": True},
    "dummy prefix only": {"byte_fallback": True, "remove_extra_whitespaces": False},
    "squeezed spaces only": {"byte_fallback": True, "add_dummy_prefix": False},
    "pieces across words": {"split_by_whitespace": False, "byte_fallback": True},
    "spaces as suffix": {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False},
}


@pytest.fixture(scope="session", params=OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def other(request, corpus, tmp_path_factory):
    """A model with other settings, in both implementations."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus for line in text.replace("\0", "").split("\n")),
        model_writer=written,
        model_type="bpe",
        vocab_size=500,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
        **request.param,
    )
    path = tmp_path_factory.mktemp("other") / "some.model"
    path.write_bytes(written.getvalue())
    return load(path), sentencepiece.SentencePieceProcessor(model_file=str(path))


@given(text=TEXT)
@ANY
def test_other_settings(other, text):
    tokenizer, reference = other
    if not tokenizer.adds_dummy_prefix:
        text = text.replace("▁", "")
    assert ids(tokenizer, text) == reference.encode(text)


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"normalization_rule_name": "nmt_nfkc"}])
def test_models_that_cannot_be_reproduced_are_refused(corpus, tmp_path, options):
    written = io.BytesIO()
    arguments = {"model_type": "bpe", "normalization_rule_name": "identity"} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[1].split("\n")),
        model_writer=written,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        **arguments,
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(written.getvalue())
    with pytest.raises(TokenizerError, match="tokenizer.model: this SentencePiece model .* tokenizer.json"):
        load(path)
