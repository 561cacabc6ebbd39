"""Tokenizers through GGUF and back: the same ids, in our engine and in llama.cpp."""

from __future__ import annotations

import json
import struct

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.config_from_gguf import MetadataReader
from mlxlm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from mlxlm.checkpoint.gguf.reader import read_header
from mlxlm.checkpoint.gguf.tokenizer_from_gguf import read_tokenizer
from mlxlm.checkpoint.gguf.tokenizer_to_gguf import tokenizer_metadata
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.tokenizer.train import WORDS
from mlxlm.utils.errors import ConfigError, TokenizerError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of

# Prose, code, numbers, accents, CJK, emoji, odd spaces; no U+2581, which SentencePiece can't tell from a space.
SAMPLE = (
    "The quick brown fox didn't jump over 13 lazy dogs; it cost $1,234.56 in 2024.\n\n"
    "def fibonacci(n):\n    if n < 2:\n        return n\n\treturn fibonacci(n - 1) + fibonacci(n - 2)\r\n"
    "Ça coûte très cher, naïve façade. 東京都は日本の首都です。 Привет, мир! \u200bשלום DON'T We'll\n"
    "👩‍👩‍👧 🎉🎉 e\u0301 \u00a0 \u3000 ½ ² \x07\x7f …—“quotes”    \n   \n end"
)


@pytest.fixture(scope="session")
def texts(make_text):
    return [SAMPLE * 3, make_text(1000), "Once there was a cat (the cat sat). 12345 6789\n" * 20]


@pytest.fixture(scope="session")
def byte_level(texts):
    return train(texts, 420, "byte-level")


@pytest.fixture(scope="session")
def sentencepiece_bpe(texts):
    return train(texts, 420, "sentencepiece")


@pytest.fixture(params=["byte_level", "sentencepiece_bpe"])
def trained(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def through(tmp_path, open_llama_cpp, tiny_tokenizer):
    """`through(tokenizer)`: what comes back from a file, and `encode` of llama.cpp with that file."""

    def send(tokenizer, rows=None, notes=()):
        model = random_model("qwen2", tiny_tokenizer)
        rows = rows or tokenizer.vocab_size
        config = model.config.with_changes(vocab_size=rows, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        path = tmp_path / "my-phi3.gguf"  # a name that must not matter to llama.cpp
        written = gguf.write(path, config, tensors_of(Decoder(config)), tokenizer, "F16")
        assert written.notes == tuple(notes)

        loaded = open_llama_cpp(path, vocab_only=True)
        again = open_checkpoint(path).load_tokenizer()
        return again, lambda text: loaded.tokenize(text.encode(), add_bos=True, special=False)

    return send


def check(tokenizer, again, llama_cpp, text):
    ids = tokenizer.encode(text)
    assert again.encode(text) == ids
    assert (
        again.special_token_names == tokenizer.special_token_names and again.special_tokens == tokenizer.special_tokens
    )
    assert again.decode(ids) == tokenizer.decode(ids)
    assert llama_cpp(text) == ids


def test_trained_tokenizers(trained, through, texts):
    again, llama_cpp = through(trained)
    assert again.fingerprint == trained.fingerprint
    check(trained, again, llama_cpp, "\n".join(texts))


def test_chat_tokens_and_template(trained, through):
    trained.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    again, _ = through(trained)
    trained.chat_template, template = None, trained.chat_template
    assert again.chat_template == template
    text = "<|user|>hi<|end|>\n<|assistant|>"
    for parse in (False, True):
        assert again.encode(text, parse_special=parse) == trained.encode(text, parse_special=parse)


def test_rows_without_a_token_are_padding(trained, through):
    again, llama_cpp = through(trained, rows=trained.vocab_size + 13)
    assert again.vocab_size == trained.vocab_size
    check(trained, again, llama_cpp, SAMPLE)


@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_real_tokenizers_on_real_text(name, shared_data, through):
    folder = shared_data.parent / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"no tokenizer {name} beside this checkout")
    tokenizer = load(folder)
    again, llama_cpp = through(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    for path in shared_data.glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert again.encode(text) == tokenizer.encode(text)
        check(tokenizer, again, llama_cpp, text[:100_000])  # llama.cpp takes seconds for a megabyte
    check(tokenizer, again, llama_cpp, SAMPLE)


def test_llama_tokenizer_json_without_its_model(shared_data, through, tmp_path):
    """Scores are found in the order of the merges."""
    folder = shared_data.parent / "tokenizers" / "llama2"
    if not folder.is_dir():
        pytest.skip("no Llama 2 tokenizer beside this checkout")
    load(folder).save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.model").unlink()
    tokenizer = load(tmp_path / "saved")
    assert tokenizer.sentencepiece_model is None
    again, llama_cpp = through(tokenizer)
    for text in (SAMPLE, "  two  spaces ", "a", ""):
        check(tokenizer, again, llama_cpp, text)


def test_llama_tokenizer_json_of_transformers(shared_data, through, tmp_path):
    """Its merges are in another order, and it puts no space before a text that begins with one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = shared_data.parent / "tokenizers" / "llama2"
    if not folder.is_dir():
        pytest.skip("no Llama 2 tokenizer beside this checkout")
    transformers.LlamaTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    tokenizer = load(tmp_path / "saved")
    again, llama_cpp = through(tokenizer, notes=[ONE_SPACE])
    check(tokenizer, again, llama_cpp, SAMPLE)
    assert again.encode("  two") == llama_cpp("  two")


ONE_SPACE = "llama.cpp puts a space before each text, this tokenizer only before one that begins with none"


def test_trained_sentencepiece_without_its_model(sentencepiece_bpe, through, tmp_path):
    sentencepiece_bpe.save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.model").unlink()
    tokenizer = load(tmp_path / "saved")
    again, llama_cpp = through(tokenizer)
    check(tokenizer, again, llama_cpp, SAMPLE)


def test_added_tokens(trained, through):
    runtime = tokenizers.Tokenizer.from_str(trained.to_json())
    runtime.add_special_tokens(["<|im_start|>"])
    runtime.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer = Tokenizer(runtime, trained.names, sentencepiece_model=trained.sentencepiece_model)
    again, llama_cpp = through(tokenizer)
    text = "use <tool> and <|im_start|>that<tool>"
    assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
    check(tokenizer, again, llama_cpp, text)


def test_user_defined_pieces_of_sentencepiece(texts, tmp_path, open_llama_cpp):
    """Gemma's tokenizer has runs of spaces and tags among its pieces."""
    import io

    import gguf as oracle
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(texts).split("\n")), model_writer=written, model_type="bpe", vocab_size=500,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, user_defined_symbols=["▁▁", "▁▁▁", "<table>"], minloglevel=2,
    )  # fmt: skip
    proto = sentencepiece.sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    writer = oracle.GGUFWriter(tmp_path / "m.gguf", "llama")
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
    theirs = open_llama_cpp(tmp_path / "m.gguf", vocab_only=True)
    encoder = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    for text in ("a    b  c <table> x <table>y", "     the cat", "x\n   y   ", SAMPLE):
        assert tokenizer.encode(text) == encoder.encode(text)
        assert tokenizer.encode(text) == theirs.tokenize(text.encode(), add_bos=False, special=False)


def with_pre(byte_level, name):
    """The same merges with another way to cut words."""
    pre, runtime = PRE_TOKENIZERS[name], tokenizers.Tokenizer.from_str(byte_level.to_json())
    runtime.model.ignore_merges = pre.ignore_merges
    runtime.pre_tokenizer = pre.pre_tokenizer()
    runtime.normalizer = pre.normalizer()
    return Tokenizer(runtime, byte_level.names)


@pytest.mark.parametrize("name", sorted({id(pre): name for name, pre in reversed(PRE_TOKENIZERS.items())}.values()))
def test_every_way_to_cut_words(name, byte_level, through, texts):
    tokenizer = with_pre(byte_level, name)
    found, notes = find_pre_tokenizer(json.loads(tokenizer.to_json()))
    assert (PRE_TOKENIZERS[found].steps, PRE_TOKENIZERS[found].ignore_merges) == (
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


def test_composed_text_where_llama_cpp_has_no_such_name(byte_level):
    model = json.loads(with_pre(byte_level, "gpt-2").to_json())
    model["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    name, notes = find_pre_tokenizer(model)
    assert name == "gpt-2" and "NFC" in notes[0]


def test_spellings_of_one_expression(byte_level):
    model = json.loads(byte_level.to_json())
    plain = model["pre_tokenizer"]["pretokenizers"][0]
    assert plain["pattern"]["Regex"] == WORDS
    for behavior, invert in (("Isolated", False), ("Removed", True)):
        plain |= {"behavior": behavior, "invert": invert}
        assert find_pre_tokenizer(model) == ("smaug-bpe", [])
    plain |= {"behavior": "Removed", "invert": False}
    with pytest.raises(TokenizerError, match="splits words"):
        find_pre_tokenizer(model)


CHANGES = {
    "splits words": lambda r: setattr(r, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )),
    "normalizes text": lambda r: setattr(r, "normalizer", normalizers.Lowercase()),
    "puts other tokens around": lambda r: setattr(r, "post_processor", processors.TemplateProcessing(
        single="$A:0 <|end|>:0 <|end|>:0", pair=None, special_tokens=[("<|end|>", r.token_to_id("<|end|>"))],
    )),
    "dropout": lambda r: setattr(r.model, "dropout", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_tokenizers_that_llama_cpp_lacks_are_refused(message, byte_level, through):
    runtime = tokenizers.Tokenizer.from_str(byte_level.to_json())
    CHANGES[message](runtime)
    with pytest.raises(TokenizerError, match=message):
        through(Tokenizer(runtime, byte_level.names))


def test_a_tokenizer_larger_than_the_model_is_refused(byte_level, through):
    with pytest.raises(TokenizerError, match="the tokenizer has 420 tokens, the model 400"):
        through(byte_level, rows=400)


@pytest.mark.parametrize("case", ["one merge less", "out of order"])
def test_merges_that_no_scores_have(case, sentencepiece_bpe):
    model = json.loads(sentencepiece_bpe.to_json())
    merges = model["model"]["merges"]
    if case == "one merge less":
        del merges[-1]
    else:  # a token that two merges make, the second one behind those of other tokens
        made = ["".join(merge) for merge in merges]
        i = next(i for i, token in enumerate(made) if made[i + 1 : i + 2] == [token] and len(set(token)) > 1)
        merges.append(merges.pop(i))
    runtime = tokenizers.Tokenizer.from_str(json.dumps(model))
    with pytest.raises(TokenizerError, match="follow from its tokens|in an order"):
        tokenizer_metadata(Tokenizer(runtime, sentencepiece_bpe.names), ModelConfig(32, 1, 4, 64, 420))


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


UNREADABLE = {
    "tokenizer.ggml.model is 'bert'": (b"gpt2", b"bert"),
    "tokenizer.ggml.pre is 'smaug-xyz'": (b"smaug-bpe", b"smaug-xyz"),
    "there is no tokenizer.ggml.pre": (b"ggml.pre", b"ggml.xxx"),
    "merges must be a list": (b"ggml.merges", b"ggml.xxxxxx"),
    "tokens must be a list": (b"ggml.tokens", b"ggml.xxxxxx"),
    "_h.*', which is no pair": (b"t h", b"t_h"),
    "the same token twice": (string("!"), string("#")),
}


@pytest.mark.parametrize("message", UNREADABLE)
def test_tokenizers_that_cannot_be_rebuilt(message, tiny_tokenizer, tmp_path):
    model, path = random_model("qwen2", tiny_tokenizer), tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    content = path.read_bytes()
    old, new = UNREADABLE[message]
    path.write_bytes(content.replace(old, new, 1))
    opened = open_checkpoint(path)
    with pytest.raises(TokenizerError, match=message) as caught:
        opened.load_tokenizer()
    assert str(path) in str(caught.value)


def test_a_token_id_outside_the_vocabulary_is_refused_when_the_file_is_opened(tiny_tokenizer, tmp_path):
    model, path = random_model("qwen2", tiny_tokenizer), tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    key = b"bos_token_id" + struct.pack("<I", 4)
    path.write_bytes(path.read_bytes().replace(key + struct.pack("<I", 0), key + struct.pack("<I", 1 << 30), 1))
    with pytest.raises(ConfigError, match="m.gguf.*bos_token_id is 1073741824, it must be a token id below"):
        open_checkpoint(path)
