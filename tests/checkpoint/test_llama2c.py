"""llama2.c files against a Llama in numpy that turns neighbouring pairs as run.c does, and their tokenizers."""

import io
import struct

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.llama2c import open_llama2c, write
from mlxlm.checkpoint.llama2c_tokenizer import find_tokenizer, read_tokenizer, tokenizer_bytes
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer, load, sentencepiece, train
from mlxlm.utils.errors import CheckpointError, ConfigError, TokenizerError

DIM, WIDE, LAYERS, HEADS, KV, VOCAB, LENGTH = 32, 48, 2, 4, 2, 300, 16
TOKENS = [[1, 7, 42, 250, 3, 3, 99]]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A SentencePiece model like llama2.c's own, of 300 tokens."""
    proto = sentencepiece_proto()
    model = sentencepiece.parse(proto, "test")
    names = sentencepiece.special_names(model)
    return Tokenizer(sentencepiece.convert(model), names, sentencepiece_model=proto)


def sentencepiece_proto(**settings) -> bytes:
    import sentencepiece as spm

    text = ["the cat sat on a mat", "and saw two birds in the garden", "  while rain fell", "a hat, that cat"]
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 5), model_writer=written, model_type="bpe", vocab_size=VOCAB, byte_fallback=True,
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2, **settings},
    )  # fmt: skip
    return written.getvalue()


def config(**changes) -> ModelConfig:
    values = {
        "hidden_size": DIM, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "vocab_size": VOCAB, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})


def model_tensors(**changes):
    model = Decoder(config(**changes))
    model.init_weights(3)
    return {name: lazy_tensor(value) for name, value in tree_flatten(model.parameters())}


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """A model's arrays under llama2.c's own names, layers stacked."""
    rng = np.random.default_rng(0)
    kv = DIM // HEADS * KV
    shapes = {
        "tok": (VOCAB, DIM), "rms_att": (LAYERS, DIM), "wq": (LAYERS, DIM, DIM), "wk": (LAYERS, kv, DIM),
        "wv": (LAYERS, kv, DIM), "wo": (LAYERS, DIM, DIM), "rms_ffn": (LAYERS, DIM), "w1": (LAYERS, WIDE, DIM),
        "w2": (LAYERS, DIM, WIDE), "w3": (LAYERS, WIDE, DIM), "rms_final": (DIM,), "wcls": (VOCAB, DIM),
    }  # fmt: skip
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


V0 = ["tok", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "rope", "wcls"]
V1 = ["rms_att", "rms_ffn", "rms_final", "tok", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "wcls"]


def quantized(value: np.ndarray, group: int) -> tuple[bytes, np.ndarray]:
    """Version 2's bytes of one tensor, and the values that they stand for."""
    groups = value.reshape(-1, group)
    scales = np.abs(groups).max(1, keepdims=True) / np.float32(127)
    whole = np.round(groups / scales).astype(np.int8)
    return whole.tobytes() + scales.tobytes(), (whole * scales).astype(np.float32).reshape(value.shape)


def file_bytes(weights, version: int, tied: bool, group: int = 0) -> bytes:
    """A file as export.py lays it out; version 2 rounds `weights` in place."""
    sign = -1 if version == 0 and not tied else 1
    numbers = struct.pack("<7i", DIM, WIDE, LAYERS, HEADS, KV, sign * VOCAB, LENGTH)
    if version:
        numbers = struct.pack("<Ii", 0x616B3432, version) + numbers + bytes([tied])
        numbers += struct.pack("<i", group) if version == 2 else b""
        numbers = numbers.ljust(256, b"\0")
    parts = [numbers]
    for name in V1 if version else V0:
        if name == "rope":
            parts.append(bytes(4 * LENGTH * DIM // HEADS))
        elif name == "wcls" and tied:
            continue
        elif version == 2 and not name.startswith("rms"):
            layers = weights[name] if weights[name].ndim == 3 else weights[name][None]
            for layer in layers:
                content, layer[:] = quantized(layer, group)
                parts.append(content)
        else:
            parts.append(weights[name].tobytes())
    return b"".join(parts)


def numpy_logits(w: dict[str, np.ndarray], tokens: list[int], tied: bool) -> np.ndarray:
    """Llama in float64 from llama2.c's arrays, after the equations of run.c's `forward`."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    head = DIM // HEADS

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def turned(x):  # [T, H, D], neighbours are a pair
        angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, head, 2) / head)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = w["tok"][tokens]
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(LAYERS):
        h = norm(x, w["rms_att"][i])
        q = turned((h @ w["wq"][i].T).reshape(-1, HEADS, head))
        k = turned((h @ w["wk"][i].T).reshape(-1, KV, head)).repeat(HEADS // KV, 1)
        v = (h @ w["wv"][i].T).reshape(-1, KV, head).repeat(HEADS // KV, 1)
        scores = np.where(seen, np.einsum("thd,shd->hts", q, k) / np.sqrt(head), -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", share, v).reshape(-1, DIM) @ w["wo"][i].T
        h = norm(x, w["rms_ffn"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["rms_final"]) @ w["tok" if tied else "wcls"].T


def decoder(checkpoint) -> Decoder:
    model = Decoder(checkpoint.config)
    model.load_weights([(name, tensor.read()) for name, tensor in checkpoint.tensors.items()])
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("version", "group"), [(0, 0), (1, 0), (2, 16), (2, 64)])
def test_every_version_computes_what_run_c_computes(tmp_path, weights, version, group, tied):
    path = tmp_path / "model.bin"
    path.write_bytes(file_bytes(weights, version, tied, group))
    checkpoint = open_llama2c(path)
    assert checkpoint.format == "llama2.c" and checkpoint.config == config(tie_word_embeddings=tied)
    assert checkpoint.hf_config["num_key_value_heads"] == KV
    for tensor in checkpoint.tensors.values():
        value = tensor.read()
        assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
    found = np.array(decoder(checkpoint)(mx.array(TOKENS)))
    np.testing.assert_allclose(found[0], numpy_logits(weights, TOKENS[0], tied), atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_written_and_read_back_is_bit_equal(tmp_path, words, tied):
    tensors = model_tensors(tie_word_embeddings=tied)
    path = tmp_path / "out/model.bin"
    write(path, config(tie_word_embeddings=tied), tensors, words)
    checkpoint = open_llama2c(path)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(mx.array_equal(checkpoint.tensors[name].read(), tensors[name].read()) for name in tensors)
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.bin", "tokenizer.bin"]
    text = "the cat, a naïve 猫\n\n  sat \t <s>"
    assert checkpoint.load_tokenizer().encode(text) == words.encode(text)
    again = tmp_path / "again.bin"
    write(again, checkpoint.config, checkpoint.tensors, checkpoint.load_tokenizer())
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("hidden", "heads", "length"), [(DIM, HEADS, LENGTH), (96, 2, 5000)])
def test_the_rotary_tables_are_those_of_export(tmp_path, words, hidden, heads, length):
    torch = pytest.importorskip("torch")
    if not torch.backends.mkl.is_available():
        pytest.skip("PyTorch without MKL, as on Arm, has another cosine than where llama2.c's models were exported")
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "max_position_embeddings": length}
    write(tmp_path / "model.bin", config(**sizes), model_tensors(**sizes), words)
    head = hidden // heads
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, head, 2)[: head // 2].float() / head))
    angles = torch.outer(torch.arange(length), frequencies).float()
    wanted = torch.cat([torch.cos(angles).flatten(), torch.sin(angles).flatten()]).numpy()
    assert np.array_equal(np.fromfile(tmp_path / "model.bin", np.float32)[-wanted.size :], wanted)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 16}, "head_dim"),
        ({"eos_token_id": [2, 5]}, "eos_token_id"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "quantization"),
    ],
)
def test_what_the_format_can_not_say_is_refused(tmp_path, words, changes, field):
    with pytest.raises(ConfigError, match=f"^{field} is .* can only mean"):
        write(tmp_path / "model.bin", config(**changes), {}, words)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_model_that_can_not_be_written(tmp_path, words):
    tensors = model_tensors()
    path = tmp_path / "model.bin"
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {**tensors, name: lazy_tensor(tensors[name].read() * float("nan"))}
    with pytest.raises(CheckpointError, match=f"{name} has values that are not finite"):
        write(path, config(), broken, words)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        write(path, config(), {n: t for n, t in tensors.items() if n != name}, words)
    with pytest.raises(CheckpointError, match=rf"{name} is \[2\], the configuration says \[48, 32\]"):
        write(path, config(), {**tensors, name: lazy_tensor(mx.zeros(2))}, words)
    with pytest.raises(CheckpointError, match="model.layers.0.mlp.up_proj.bias has no place"):
        write(path, config(), {**tensors, "model.layers.0.mlp.up_proj.bias": lazy_tensor(mx.zeros(48))}, words)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, words):
    tensors = model_tensors()
    path, beside = tmp_path / "model.bin", tmp_path / "tokenizer.bin"
    beside.write_bytes(b"another")
    with pytest.raises(CheckpointError, match="tokenizer.bin is there already, of another model"):
        write(path, config(), tensors, words)
    assert beside.read_bytes() == b"another" and not path.exists()
    beside.write_bytes(tokenizer_bytes(words, VOCAB))
    write(path, config(), tensors, words)
    with pytest.raises(CheckpointError, match="model.bin already exists"):
        write(path, config(), tensors, words)
    with pytest.raises(CheckpointError, match="name of the tokenizer"):
        write(beside, config(), tensors, words)


def test_tokenizers_that_run_c_would_read_otherwise_are_refused(tmp_path, words, tiny_tokenizer, make_text):
    with pytest.raises(TokenizerError, match="SentencePiece tokenizers as Llama 2.s, this one is byte-level"):
        tokenizer_bytes(tiny_tokenizer, VOCAB)
    ours = train([make_text(3000)], 320, "sentencepiece")
    with pytest.raises(TokenizerError, match="token 3 .* run.c takes it for '<0x00>'"):
        tokenizer_bytes(ours, 320)
    with pytest.raises(TokenizerError, match="has 300 tokens, the model 299"):
        tokenizer_bytes(words, 299)
    for settings, what in [
        ({"add_dummy_prefix": False}, "no space first"),
        ({"remove_extra_whitespaces": True}, "rem"),
    ]:
        proto = sentencepiece_proto(**settings)
        runtime = sentencepiece.convert(sentencepiece.parse(proto, "test"))
        with pytest.raises(TokenizerError, match=what):
            tokenizer_bytes(Tokenizer(runtime, {}, sentencepiece_model=proto), VOCAB)


def test_rows_without_a_token_get_one_that_no_text_becomes(tmp_path, words):
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bytes(words, VOCAB + 4))
    padded = read_tokenizer(tmp_path / "tokenizer.bin", VOCAB + 4)
    assert padded.vocab_size == VOCAB + 4 and padded.special_tokens["<unused302>"] == 302
    assert padded.encode("<unused302> cat") == words.encode("<unused302> cat")


def test_which_tokenizer_is_a_models(tmp_path):
    model = tmp_path / "stories.bin"
    with pytest.raises(TokenizerError, match="no tokenizer beside .*stories.bin .*tok300.bin or tokenizer.bin"):
        find_tokenizer(model, 300)
    for name in ("tokenizer.bin", "tok300.bin", "stories.tokenizer.bin"):
        (tmp_path / name).write_bytes(b"")
        assert find_tokenizer(model, 300).name == name


def test_llama_2s_tokenizer_on_real_text(tmp_path, shared_data):
    """Through the file, the ids are SentencePiece's own."""
    import sentencepiece as spm

    source = shared_data.parent / "tokenizers/llama2/tokenizer.model"
    if not source.is_file():
        pytest.skip("no Llama 2 tokenizer beside this checkout")
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(tokenizer_bytes(load(source), 32000))
    tokenizer = read_tokenizer(path, 32000)
    reference = spm.SentencePieceProcessor(model_file=str(source))
    for file in sorted(shared_data.glob("*.txt")):
        text = file.read_text(encoding="utf-8")[:300_000]
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
    assert tokenizer_bytes(tokenizer, 32000) == path.read_bytes()


@pytest.mark.parametrize(("version", "group"), [(0, 0), (1, 0), (2, 16)])
def test_a_file_of_another_length(tmp_path, weights, version, group):
    content = file_bytes(weights, version, tied=False, group=group)
    path = tmp_path / "model.bin"
    for size in (0, 4, 27, 30, 255, 256, 5000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="model.bin is truncated"):
            open_llama2c(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="by its header it has"):
        open_llama2c(path)


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (0, 3, "no multiple of n_heads|dim"),
        (0, -32, "dim is -32"),
        (4, 2**31 - 1, "is truncated|parameters"),
        (8, 1_000_000, "n_layers is 1000000, more than"),
        (8, 0, "n_layers is 0"),
        (12, 3, "dim 32 is no multiple of n_heads 3"),
        (16, 3, "num_key_value_heads 3 does not divide"),
        (20, -(2**31), "work: vocab_size"),
        (24, 2**31 - 1, "rotary table ends"),
    ],
)
def test_numbers_that_can_not_be(tmp_path, weights, at, value, expected):
    content = bytearray(file_bytes(weights, 0, tied=True))
    struct.pack_into("<i", content, at, value)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model.bin.*({expected})"):
        open_llama2c(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (4, 3, "version is 3"),
        (36, 2, "shared_classifier is 2"),
        (37, 0, "group_size is 0"),
        (37, 7, "group_size is 7, .* no multiple"),
    ],
)
def test_flags_that_can_not_be(tmp_path, weights, at, value, expected):
    content = bytearray(file_bytes(weights, 2, tied=True, group=16))
    content[at] = value
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        open_llama2c(tmp_path / "model.bin")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path, weights):
    path = tmp_path / "model.bin"
    path.write_bytes(file_bytes(weights, 0, tied=True))
    tensors = open_llama2c(path).tensors
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="model.norm.weight can't be read"):
        tensors["model.norm.weight"].read()


def test_malformed_tokenizers(tmp_path, words):
    path = tmp_path / "tokenizer.bin"
    whole = tokenizer_bytes(words, VOCAB)

    def fails(content: bytes, expected: str, vocab_size: int = VOCAB) -> None:
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=rf"tokenizer.bin.*{expected}"):
            read_tokenizer(path, vocab_size)

    fails(b"\0\0", "ends before max_token_length")
    fails(whole[:-1], f"token {VOCAB - 1} is . bytes long.* left")
    fails(whole + b"\0", "goes on after token 299")
    fails(whole, "ends before token 300", VOCAB + 1)
    fails(whole, "ends before token 300", 1_000_000)
    fails(whole, "has 2000000 tokens", 2_000_000)
    fails(struct.pack("<I", 1) + whole[4:], "token 0 is 5 bytes long, max_token_length is 1")
    fails(whole[:4] + struct.pack("<f", float("nan")) + whole[8:], "score of token 0 is nan")
    fails(whole[:8] + struct.pack("<I", 2**32 - 1) + whole[12:], "token 0 is 4294967295 bytes long")
    fails(whole[:-1] + b"\xff", "token 299 is not UTF-8")
    fails(whole.replace(b"<0x41>", b"<0x42>"), "token 68 is '<0x42>', run.c takes it for '<0x41>'")
