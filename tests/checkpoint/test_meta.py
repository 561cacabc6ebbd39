"""Folders in Meta's layout compute what Meta's formulas do with their weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, open_checkpoint
from mlxlm.convert import convert
from mlxlm.tokenizer import tiktoken
from mlxlm.utils.errors import CheckpointError, ConfigError, MissingTokenizerError
from tests.small_models import sentencepiece_proto
from tests.tokenizer.test_tiktoken import vocabulary
from tests.tokenizer.test_tiktoken import write as write_tiktoken

torch = pytest.importorskip("torch", reason="it writes the files (pip install torch)")

DIM, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 64, 4, 2, 2, 96
LLAMA2 = {
    "dim": DIM, "multiple_of": 32, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "n_layers": LAYERS, "norm_eps": 1e-5,
    "vocab_size": -1,
}  # fmt: skip
LLAMA3 = {**LLAMA2, "vocab_size": VOCAB, "rope_theta": 500_000.0, "ffn_dim_multiplier": 1.3}
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def random_weights():
    generator = torch.Generator().manual_seed(0)
    width = DIM // HEADS * KV_HEADS
    shapes = {"tok_embeddings.weight": (VOCAB, DIM), "norm.weight": (DIM,), "output.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        layer = {
            "attention.wq": (DIM, DIM), "attention.wk": (width, DIM), "attention.wv": (width, DIM),
            "attention.wo": (DIM, DIM), "feed_forward.w1": (HIDDEN, DIM), "feed_forward.w2": (DIM, HIDDEN),
            "feed_forward.w3": (HIDDEN, DIM), "attention_norm": (DIM,), "ffn_norm": (DIM,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1) for name, shape in shapes.items()}


def write(folder, weights, params, files=1):
    """Write the parts of each tensor; the embedding is cut by columns in Llama 2, by rows in Llama 3."""
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    embedding_axis = 0 if "rope_theta" in params else 1
    for i in range(files):
        part = {"rope.freqs": torch.ones(4)}
        for name, value in weights.items():
            axis = embedding_axis if "tok_embeddings" in name else 1 if name.endswith(COLUMNS) else 0
            # In the files, parts are copies with a storage of their own.
            part[name] = value if value.ndim == 1 else value.chunk(files, axis)[i].clone()
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    return folder


def meta_logits(weights, tokens, theta):
    """Llama as in Meta's model.py, with complex rotary factors, of one text."""
    size, length = DIM // HEADS, len(tokens)
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, size, 2).float() / size))
    factors = torch.polar(torch.ones_like(angles), angles)[:, None]
    mask = torch.full((length, length), -torch.inf).triu(1)

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    def rotated(x):
        pairs = torch.view_as_complex(x.reshape(length, -1, size // 2, 2))
        return torch.view_as_real(pairs * factors).flatten(2)

    x = weights["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        w = {name.removeprefix(f"layers.{i}.").removesuffix(".weight"): value for name, value in weights.items()}
        h = norm(x, f"layers.{i}.attention_norm")
        q, k, v = (h @ w[f"attention.w{letter}"].T for letter in "qkv")
        q, k, v = rotated(q), rotated(k), v.reshape(length, -1, size)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5 + mask
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["attention.wo"].T
        h = norm(x, f"layers.{i}.ffn_norm")
        gate = torch.nn.functional.silu(h @ w["feed_forward.w1"].T)
        x = x + (gate * (h @ w["feed_forward.w3"].T)) @ w["feed_forward.w2"].T
    return norm(x, "norm") @ weights["output.weight"].T


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("params", [LLAMA2, LLAMA3], ids=["llama2", "llama3"])
def test_logits_are_meta_s(tmp_path, params, files):
    weights = random_weights()
    folder = write(tmp_path / "model", weights, params, files)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.config.intermediate_size, checkpoint.config.vocab_size) == (
        "meta",
        HIDDEN,
        96,
    )
    tokens = [1, 5, 7, 90, 2, 33]
    expected = meta_logits(weights, tokens, params.get("rope_theta", 10_000.0)).numpy()
    np.testing.assert_allclose(np.array(load_model(folder)[0](mx.array([tokens]))[0]), expected, rtol=1e-4, atol=1e-4)
    assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == sum(t.nbytes for t in weights.values())


@pytest.mark.parametrize(
    ("params", "context", "factor"),
    [
        (LLAMA2, 4096, None),
        ({**LLAMA2, "norm_eps": 1e-6}, 2048, None),
        ({**LLAMA2, "rope_theta": 1_000_000}, 16_384, None),
        ({**LLAMA2, "max_seq_len": 512}, 512, None),
        (LLAMA3, 8192, None),
        ({**LLAMA3, "use_scaled_rope": True}, 131_072, 32.0),
    ],
)
def test_settings_that_follow_from_others(tmp_path, params, context, factor):
    weights = random_weights()
    del weights["output.weight"]
    config = open_checkpoint(write(tmp_path / "model", weights, params)).config
    assert config.max_position_embeddings == context and config.tie_word_embeddings
    assert (config.rope_scaling or {}).get("factor") == factor


def test_tokenizers_and_conversion(tmp_path, monkeypatch, make_text):
    folder = write(tmp_path / "model", random_weights(), LLAMA2)
    with pytest.raises(MissingTokenizerError, match="no tokenizer in"):
        open_checkpoint(folder).load_tokenizer()
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_proto())
    assert open_checkpoint(folder).load_tokenizer().tokenizer_type == "sentencepiece"
    ranks = vocabulary(make_text(500), 300)
    monkeypatch.setattr(tiktoken, "PROGRAMS", {len(ranks): tiktoken.LLAMA3})
    write_tiktoken(folder / "tokenizer.model", ranks)
    tokenizer = open_checkpoint(folder).load_tokenizer()
    assert tokenizer.encode("the") == [len(ranks), *tokenizer.encode("the", add_special_tokens=False)]
    (folder / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.model").unlink()
    report = convert(folder, tmp_path / "out")
    assert {check.result for check in report.checks} <= {"equal", "within rounding", "skipped"}
    read, expected = open_checkpoint(tmp_path / "out"), open_checkpoint(folder)
    for name, tensor in expected.tensors.items():
        assert mx.array_equal(read.tensors[name].read(), tensor.read())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p, w: p.update(moe_args={}), "params.json: moe_args isn't a setting of Llama 1, 2 or 3"),
        (lambda p, w: p.update(n_heads="4"), "params.json: n_heads is '4', it must be a positive number"),
        (lambda p, w: p.update(n_layers=3), r"model.layers.2 is missing"),
        (lambda p, w: p.update(n_layers=2**40), r"n_layers is 1099511627776"),
        (lambda p, w: p.update(n_kv_heads=3), "num_key_value_heads"),
        (lambda p, w: p.update(dim=64), "embed_tokens"),
        (lambda p, w: w.pop("tok_embeddings.weight"), "there is no matrix tok_embeddings.weight"),
        (lambda p, w: w.pop("norm.weight"), "model.norm.weight is missing"),
        (lambda p, w: w.update({"layers.0.x.weight": torch.ones(2)}), "layers.0.x.weight is not part of this model"),
    ],
)
def test_errors_name_the_field_or_the_tensor(tmp_path, change, expected):
    params, weights = dict(LLAMA2), random_weights()
    change(params, weights)
    with pytest.raises((CheckpointError, ConfigError), match=expected) as raised:
        open_checkpoint(write(tmp_path / "model", weights, params))
    assert "\n" not in str(raised.value) and "model" in str(raised.value)


def test_missing_and_different_files(tmp_path):
    folder = write(tmp_path / "model", random_weights(), LLAMA2, files=2)
    first, second = folder / "consolidated.00.pth", folder / "consolidated.01.pth"
    content = torch.load(second)
    torch.save(content | {"layers.1.attention.wv.weight": torch.ones(4, 32)}, second)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.wv\.weight is not a matrix of one shape"):
        open_checkpoint(folder)
    del content["layers.1.attention.wo.weight"]
    torch.save(content, second)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.wo\.weight isn't in all of the 2 files"):
        open_checkpoint(folder)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth is missing"):
        open_checkpoint(folder)
