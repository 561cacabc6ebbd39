"""A SentencePiece tokenizer like llama2.c's own."""

import io

import pytest

from mlxlm.tokenizer import Tokenizer, sentencepiece

VOCAB = 300


def sentencepiece_proto(**settings) -> bytes:
    import sentencepiece as spm

    text = ["the cat sat on a mat", "and saw two birds in the garden", "  while rain fell", "a hat, that cat"]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 5), model_writer=model, model_type="bpe", vocab_size=VOCAB, byte_fallback=True,
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2, **settings},
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A SentencePiece model like llama2.c's own, of 300 tokens."""
    proto = sentencepiece_proto()
    model = sentencepiece.parse(proto, "test")
    names = sentencepiece.special_names(model)
    return Tokenizer(sentencepiece.convert(model), names, sentencepiece_model=proto)
