"""Tokenizers from and to metadata."""

from __future__ import annotations

import json
import struct

import gguf as gguf_package
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.header import read_header
from mlxlm.checkpoint.gguf.tokenizer_metadata import read_tokenizer, tokenizer_metadata
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.tokenizer.tokenizer import bos_eos_processor
from mlxlm.utils.errors import TokenizerError
from tests.checkpoint.gguf.gguf_models import random_model
from tests.checkpoint.gguf.gguf_tokenizers import SAMPLE, check
from tests.checkpoint.raw_files import finish
from tests.small_models import sentencepiece_proto, tensors_of


def test_user_defined_pieces_of_sentencepiece(texts, tmp_path, open_llama_cpp):
    """Gemma's tokenizer has runs of spaces and tags among its pieces."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_proto(
        500, tuple("\n".join(texts).split("\n")), hard_vocab_limit=False, add_dummy_prefix=False,
        user_defined_symbols="▁▁,▁▁▁,<table>",
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    finish(writer)
    tokenizer = read_tokenizer(read_header(tmp_path / "m.gguf"))
    llama_cpp = open_llama_cpp(tmp_path / "m.gguf", vocab_only=True)
    encoder = sentencepiece.SentencePieceProcessor(model_proto=model)
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


def test_trained_tokenizers(trained, through, texts):
    again, llama_cpp = through(trained)
    assert again.fingerprint == trained.fingerprint
    check(trained, again, llama_cpp, "\n".join(texts))


def test_merges_of_gemma4(through, texts):
    """SentencePiece's characters and bytes with a list of merges instead of scores."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    runtime = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    runtime.normalizer = normalizers.Replace(" ", "▁")
    runtime.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = BpeTrainer(vocab_size=600, special_tokens=special + bytes_, show_progress=False)
    runtime.train_from_iterator([*texts, "\n\n\n\n" * 9], trainer)
    description = json.loads(runtime.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] in special]
    description["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    runtime = tokenizers.Tokenizer.from_str(json.dumps(description))
    runtime.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    runtime.post_processor = bos_eos_processor(runtime, "<bos>", None)
    tokenizer = Tokenizer(runtime, {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>"})
    again, llama_cpp = through(tokenizer, kind="gemma4")
    check(tokenizer, again, llama_cpp, "\n".join(texts) + "\n\n\n")


def test_chat_tokens_and_template(trained, through):
    trained.chat_template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    again, _ = through(trained)
    trained.chat_template, template = None, trained.chat_template
    assert again.chat_template == template
    text = "<|user|>hi<|end|>\n<|assistant|>"
    for parse in (False, True):
        assert again.encode(text, parse_special=parse) == trained.encode(text, parse_special=parse)


def test_rows_without_a_token_are_unused(trained, through):
    again, llama_cpp = through(trained, rows=trained.vocab_size + 13)
    assert again.vocab_size == trained.vocab_size
    check(trained, again, llama_cpp, SAMPLE)


@pytest.mark.parametrize("name", ["llama2", "gpt2", "llama2 without its model", "llama2 of transformers"])
def test_real_tokenizers_on_real_text(name, shared_data, through, tmp_path):
    """Without tokenizer.model, scores follow the merges; transformers has them in another order, and puts no space
    before a text that begins with one."""
    kind, _, form = name.partition(" ")
    folder = shared_data.parent / "tokenizers" / kind
    if not folder.is_dir():
        pytest.skip(f"no tokenizer {kind} beside this checkout")
    if form == "without its model":
        load(folder).save(tmp_path / "saved")
        (tmp_path / "saved" / "tokenizer.model").unlink()
    elif form:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        transformers.LlamaTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    tokenizer = load(tmp_path / "saved" if form else folder)
    again, llama_cpp = through(tokenizer, notes=[ONE_SPACE] if form == "of transformers" else ())
    if not form:
        assert again.fingerprint == tokenizer.fingerprint
        for path in shared_data.glob("*.txt"):
            text = path.read_text(encoding="utf-8")
            assert again.encode(text) == tokenizer.encode(text)
            check(tokenizer, again, llama_cpp, text[:100_000])  # llama.cpp takes seconds for a megabyte
    assert again.encode("  two") == llama_cpp("  two")
    for text in (SAMPLE, "a", ""):
        check(tokenizer, again, llama_cpp, text)


ONE_SPACE = "llama.cpp puts a space before every text, this tokenizer only before those without one"


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
    tokenizer = Tokenizer(runtime, trained.special_token_names, sentencepiece_model=trained.sentencepiece_model)
    again, llama_cpp = through(tokenizer)
    text = "use <tool> and <|im_start|>that<tool>"
    assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
    check(tokenizer, again, llama_cpp, text)


CHANGES = {
    "splits text": lambda r: setattr(r, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )),
    "normalizes text": lambda r: setattr(r, "normalizer", normalizers.Lowercase()),
    "adds other tokens": lambda r: setattr(r, "post_processor", processors.TemplateProcessing(
        single="$A:0 <|end|>:0 <|end|>:0", pair=None, special_tokens=[("<|end|>", r.token_to_id("<|end|>"))],
    )),
    "dropout": lambda r: setattr(r.model, "dropout", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_unsupported_tokenizers_are_errors(message, byte_level, through):
    runtime = tokenizers.Tokenizer.from_str(byte_level.to_json())
    CHANGES[message](runtime)
    with pytest.raises(TokenizerError, match=message):
        through(Tokenizer(runtime, byte_level.special_token_names))


def test_tokenizer_larger_than_the_model_is_an_error(byte_level, through):
    with pytest.raises(TokenizerError, match="the tokenizer has 420 tokens, the model 400"):
        through(byte_level, rows=400)


@pytest.mark.parametrize("case", ["one merge less", "out of order"])
def test_merges_that_scores_cannot_express_are_errors(case, sentencepiece_bpe):
    model = json.loads(sentencepiece_bpe.to_json())
    merges = model["model"]["merges"]
    if case == "one merge less":
        del merges[-1]
    else:  # a token that two merges make, the second one behind those of other tokens
        merged = ["".join(merge) for merge in merges]
        i = next(i for i, token in enumerate(merged) if merged[i + 1 : i + 2] == [token] and len(set(token)) > 1)
        merges.append(merges.pop(i))
    runtime = tokenizers.Tokenizer.from_str(json.dumps(model))
    with pytest.raises(TokenizerError, match="follow from its tokens|in an order"):
        tokenizer_metadata(Tokenizer(runtime, sentencepiece_bpe.special_token_names), ModelConfig(32, 1, 4, 64, 420))


def test_byte_level_tokenizer_without_merges_is_an_error(byte_level):
    model = json.loads(byte_level.to_json())
    model["model"]["merges"] = []
    runtime = tokenizers.Tokenizer.from_str(json.dumps(model))
    with pytest.raises(TokenizerError, match="without merges"):
        tokenizer_metadata(Tokenizer(runtime, byte_level.special_token_names), ModelConfig(32, 1, 4, 64, 420))
