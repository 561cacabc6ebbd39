"""llama2.c files against a Llama in NumPy that rotates neighbouring pairs as run.c does, and tokenizer files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_checkpoint
from mlxlm.checkpoint.llama2c import check_output, find_tokenizer, open_llama2c, read_tokenizer, tokenizer_bytes, write
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.utils.errors import CheckpointError, ConfigError, TokenizerError
from tests.small_models import random_decoder, sentencepiece_proto, sentencepiece_tokenizer, tensors_of

DIM, INNER, LAYERS, HEADS, KV, VOCAB, LENGTH = 32, 48, 2, 4, 2, 300, 16
TOKENS = [[1, 7, 42, 250, 3, 3, 99]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A SentencePiece model like llama2.c's own, of 300 tokens."""
    return sentencepiece_tokenizer(sentencepiece_proto())


def model_tensors(**changes):
    return tensors_of(random_decoder(config(**changes), seed=3))


def config(**changes) -> ModelConfig:
    values = {
        "hidden_size": DIM, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "vocab_size": VOCAB, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """A model's arrays under llama2.c's own names, layers stacked."""
    rng = np.random.default_rng(0)
    kv = DIM // HEADS * KV
    shapes = {
        "tok": (VOCAB, DIM), "rms_att": (LAYERS, DIM), "wq": (LAYERS, DIM, DIM), "wk": (LAYERS, kv, DIM),
        "wv": (LAYERS, kv, DIM), "wo": (LAYERS, DIM, DIM), "rms_ffn": (LAYERS, DIM), "w1": (LAYERS, INNER, DIM),
        "w2": (LAYERS, DIM, INNER), "w3": (LAYERS, INNER, DIM), "rms_final": (DIM,), "wcls": (VOCAB, DIM),
    }  # fmt: skip
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


ORDER = ["tok", "rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3", "rms_final", "rope", "wcls"]


def file_bytes(weights, tied: bool) -> bytes:
    """A file as export.py writes it."""
    parts = [struct.pack("<7i", DIM, INNER, LAYERS, HEADS, KV, VOCAB if tied else -VOCAB, LENGTH)]
    for name in ORDER:
        if name == "rope":
            parts.append(bytes(4 * LENGTH * DIM // HEADS))
        elif name == "wcls" and tied:
            continue
        else:
            parts.append(weights[name].tobytes())
    return b"".join(parts)


def numpy_logits(w: dict[str, np.ndarray], tokens: list[int], tied: bool) -> np.ndarray:
    """Llama in float64 from llama2.c's arrays, after the equations of run.c's `forward`."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    head = DIM // HEADS

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x):  # [T, H, D], neighbours are a pair
        angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, head, 2) / head)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = w["tok"][tokens]
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(LAYERS):
        h = norm(x, w["rms_att"][i])
        q = rotate((h @ w["wq"][i].T).reshape(-1, HEADS, head))
        k = rotate((h @ w["wk"][i].T).reshape(-1, KV, head)).repeat(HEADS // KV, 1)
        v = (h @ w["wv"][i].T).reshape(-1, KV, head).repeat(HEADS // KV, 1)
        scores = np.where(seen, np.einsum("thd,shd->hts", q, k) / np.sqrt(head), -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", share, v).reshape(-1, DIM) @ w["wo"][i].T
        h = norm(x, w["rms_ffn"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["rms_final"]) @ w["tok" if tied else "wcls"].T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_run_c(tmp_path, weights, tied):
    path = tmp_path / "model.bin"
    path.write_bytes(file_bytes(weights, tied))
    checkpoint = open_llama2c(path)
    assert checkpoint.format == "llama2.c" and checkpoint.config == config(tie_word_embeddings=tied)
    assert checkpoint.hf_config["num_key_value_heads"] == KV
    for tensor in checkpoint.tensors.values():
        value = tensor.read()
        assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
    logits = np.array(load_checkpoint(checkpoint)[0](mx.array(TOKENS)))
    np.testing.assert_allclose(logits[0], numpy_logits(weights, TOKENS[0], tied), atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_write_then_open_is_bit_equal(tmp_path, tokenizer, tied):
    tensors = model_tensors(tie_word_embeddings=tied)
    path = tmp_path / "out/model.bin"
    path.parent.mkdir()
    write(path, config(tie_word_embeddings=tied), tensors, tokenizer)
    checkpoint = open_llama2c(path)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(mx.array_equal(checkpoint.tensors[name].read(), tensors[name].read()) for name in tensors)
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.bin", "tokenizer.bin"]
    text = "the cat, a naïve 猫\n\n  sat \t <s>"
    assert checkpoint.load_tokenizer().encode(text) == tokenizer.encode(text)
    again = tmp_path / "again.bin"
    write(again, checkpoint.config, checkpoint.tensors, checkpoint.load_tokenizer())
    assert again.read_bytes() == path.read_bytes()


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
def test_unrepresentable_fields_are_errors(tmp_path, tokenizer, changes, field):
    with pytest.raises(ConfigError, match=f"^{field} is .* but llama2.c always uses"):
        check_output(tmp_path / "model.bin", config(**changes), tokenizer)


def test_values_that_are_not_finite_are_errors(tmp_path, tokenizer):
    tensors = model_tensors()
    path = tmp_path / "model.bin"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].transform(lambda value: value * float("nan"))
    with pytest.raises(CheckpointError, match=f"{name} has values that are not finite"):
        write(path, config(), tensors, tokenizer)


def test_output_beside_another_tokenizer_is_an_error(tmp_path, tokenizer):
    path, beside = tmp_path / "model.bin", tmp_path / "tokenizer.bin"
    beside.write_bytes(b"another")
    with pytest.raises(CheckpointError, match="tokenizer.bin already exists and belongs to another model"):
        check_output(path, config(), tokenizer)
    beside.write_bytes(tokenizer_bytes(tokenizer, VOCAB))
    check_output(path, config(), tokenizer)
    with pytest.raises(CheckpointError, match="name of the tokenizer file"):
        check_output(beside, config(), tokenizer)


def test_file_truncated_after_opening(tmp_path, weights):
    path = tmp_path / "model.bin"
    path.write_bytes(file_bytes(weights, tied=True))
    tensors = open_llama2c(path).tensors
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="model.bin has become shorter"):
        tensors["model.norm.weight"].read()


def test_rotary_tables_hold_cosines_and_sines(tmp_path, tokenizer):
    write(tmp_path / "model.bin", config(), model_tensors(), tokenizer)
    head_dim = DIM // HEADS
    angles = np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    expected = np.concatenate([np.cos(angles).ravel(), np.sin(angles).ravel()])
    stored = np.fromfile(tmp_path / "model.bin", np.float32)[-expected.size :]
    np.testing.assert_allclose(stored, expected, atol=1e-6)


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
        with pytest.raises(TokenizerError, match=problem):
            tokenizer_bytes(sentencepiece_tokenizer(proto), VOCAB)


def test_rows_without_a_token_get_an_unused_one(tmp_path, tokenizer):
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bytes(tokenizer, VOCAB + 4))
    padded = read_tokenizer(tmp_path / "tokenizer.bin", VOCAB + 4)
    assert padded.vocab_size == VOCAB + 4 and padded.special_tokens["<unused302>"] == 302
    assert padded.encode("<unused302> cat") == tokenizer.encode("<unused302> cat")


def test_find_tokenizer(tmp_path):
    model = tmp_path / "stories.bin"
    with pytest.raises(TokenizerError, match="no tokenizer next to .*stories.bin .*tok300.bin or tokenizer.bin"):
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


def test_tokenizers_of_other_models_are_errors(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(tokenizer_bytes(tokenizer, VOCAB))

    for vocab_size, expected in ((VOCAB + 1, "ends before token 300"), (2_000_000, "has 2000000 tokens")):
        with pytest.raises(TokenizerError, match=rf"tokenizer.bin.*{expected}"):
            read_tokenizer(path, vocab_size)
