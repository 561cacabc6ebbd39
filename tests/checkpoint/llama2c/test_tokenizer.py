"""llama2.c's tokenizer files."""

import struct

import pytest

from mlxlm.checkpoint.llama2c.tokenizer import find_tokenizer, read_tokenizer, tokenizer_bytes
from mlxlm.tokenizer import Tokenizer, load, sentencepiece, train
from mlxlm.utils.errors import TokenizerError
from tests.checkpoint.llama2c.conftest import VOCAB, sentencepiece_proto


def test_unsupported_tokenizers_are_errors(tmp_path, tokenizer, tiny_tokenizer, make_text):
    with pytest.raises(TokenizerError, match="SentencePiece tokenizer like Llama 2.s, this one is byte-level"):
        tokenizer_bytes(tiny_tokenizer, VOCAB)
    ours = train([make_text(3000)], 320, "sentencepiece")
    with pytest.raises(TokenizerError, match="token 3 .* run.c needs '<0x00>'"):
        tokenizer_bytes(ours, 320)
    with pytest.raises(TokenizerError, match="has 300 tokens, the model 299"):
        tokenizer_bytes(tokenizer, 299)
    for settings, problem in [
        ({"add_dummy_prefix": False}, "doesn't put a space"),
        ({"remove_extra_whitespaces": True}, "removes repeated spaces"),
    ]:
        proto = sentencepiece_proto(**settings)
        runtime = sentencepiece.convert(sentencepiece.parse(proto, "test"))
        with pytest.raises(TokenizerError, match=problem):
            tokenizer_bytes(Tokenizer(runtime, {}, sentencepiece_model=proto), VOCAB)


def test_rows_without_a_token_get_an_unused_one(tmp_path, tokenizer):
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bytes(tokenizer, VOCAB + 4))
    padded = read_tokenizer(tmp_path / "tokenizer.bin", VOCAB + 4)
    assert padded.vocab_size == VOCAB + 4 and padded.special_tokens["<unused302>"] == 302
    assert padded.encode("<unused302> cat") == tokenizer.encode("<unused302> cat")


def test_find_tokenizer(tmp_path):
    model = tmp_path / "stories.bin"
    with pytest.raises(TokenizerError, match="no tokenizer beside .*stories.bin .*tok300.bin or tokenizer.bin"):
        find_tokenizer(model, 300)
    for name in ("tokenizer.bin", "tok300.bin", "stories.tokenizer.bin"):
        (tmp_path / name).write_bytes(b"")
        assert find_tokenizer(model, 300).name == name


def test_llama2_tokenizer_on_real_text(tmp_path, shared_data):
    """Through the file, the ids are SentencePiece's own."""
    import sentencepiece as spm

    source = shared_data.parent / "tokenizers/llama2/tokenizer.model"
    if not source.is_file():
        pytest.skip("no Llama 2 tokenizer beside this checkout")
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(tokenizer_bytes(load(source), 32000))
    read = read_tokenizer(path, 32000)
    reference = spm.SentencePieceProcessor(model_file=str(source))
    for file in sorted(shared_data.glob("*.txt")):
        text = file.read_text(encoding="utf-8")[:10_000]
        assert read.encode(text, add_special_tokens=False) == reference.encode(text)
    assert tokenizer_bytes(read, 32000) == path.read_bytes()


def test_malformed_tokenizers_are_errors(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.bin"
    whole = tokenizer_bytes(tokenizer, VOCAB)

    def fails(content: bytes, expected: str, vocab_size: int = VOCAB) -> None:
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=rf"tokenizer.bin.*{expected}"):
            read_tokenizer(path, vocab_size)

    fails(b"\0\0", "ends before max_token_length")
    fails(whole[:-1], f"token {VOCAB - 1} is . bytes long.* left")
    fails(whole + b"\0", "has data after token 299")
    fails(whole, "ends before token 300", VOCAB + 1)
    fails(whole, "ends before token 300", 1_000_000)
    fails(whole, "has 2000000 tokens", 2_000_000)
    fails(struct.pack("<I", 1) + whole[4:], "token 0 is 5 bytes long, max_token_length is 1")
    fails(whole[:4] + struct.pack("<f", float("nan")) + whole[8:], "score of token 0 is nan")
    fails(whole[:8] + struct.pack("<I", 2**32 - 1) + whole[12:], "token 0 is 4294967295 bytes long")
    fails(whole[:-1] + b"\xff", "token 299 is not UTF-8")
    fails(whole.replace(b"<0x41>", b"<0x42>"), "token 68 is '<0x42>', run.c needs '<0x41>'")
