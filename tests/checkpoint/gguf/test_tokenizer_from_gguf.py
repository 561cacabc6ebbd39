"""Tokenizers of files from other programs, and unreadable ones."""

from __future__ import annotations

import struct

import gguf as gguf_package
import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.header import MetadataReader, read_header
from mlxlm.checkpoint.gguf.tokenizer_metadata import read_tokenizer
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import TokenizerError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of
from tests.checkpoint.gguf.gguf_tokenizers import SAMPLE


def test_user_defined_pieces_of_sentencepiece(texts, tmp_path, open_llama_cpp):
    """Gemma's tokenizer has runs of spaces and tags among its pieces."""
    import io

    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(texts).split("\n")), model_writer=model, model_type="bpe", vocab_size=500,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, user_defined_symbols=["▁▁", "▁▁▁", "<table>"], minloglevel=2,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = read_tokenizer(MetadataReader(read_header(tmp_path / "m.gguf")))
    llama_cpp = open_llama_cpp(tmp_path / "m.gguf", vocab_only=True)
    encoder = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("a    b  c <table> x <table>y", "     the cat", "x\n   y   ", SAMPLE):
        assert tokenizer.encode(text) == encoder.encode(text)
        assert tokenizer.encode(text) == llama_cpp.tokenize(text.encode(), add_bos=False, special=False)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


UNREADABLE = {
    "tokenizer.ggml.model is 'bert'": (b"gpt2", b"bert"),
    "tokenizer.ggml.pre is 'smaug-xyz'": (b"smaug-bpe", b"smaug-xyz"),
    "there is no tokenizer.ggml.pre": (b"ggml.pre", b"ggml.xxx"),
    "merges must be a list": (b"ggml.merges", b"ggml.xxxxxx"),
    "tokens must be a list": (b"ggml.tokens", b"ggml.xxxxxx"),
    "_h.*', which is not a pair": (b"t h", b"t_h"),
    "has duplicates": (string("!"), string("#")),
}


@pytest.mark.parametrize("message", UNREADABLE)
def test_unreadable_tokenizers_are_errors(message, tiny_tokenizer, tmp_path):
    model, path = random_model("qwen2", tiny_tokenizer), tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    content = path.read_bytes()
    old, new = UNREADABLE[message]
    path.write_bytes(content.replace(old, new, 1))
    opened = open_checkpoint(path)
    with pytest.raises(TokenizerError, match=message) as caught:
        opened.load_tokenizer()
    assert str(path) in str(caught.value)
