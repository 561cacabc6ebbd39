"""Quantized matrices in MLX's format: the same weights, and models that compute the same with them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint import gguf, load, load_checkpoint, open_checkpoint, save_weights
from mlxlm.checkpoint.gguf import affine, deepseek2
from mlxlm.checkpoint.gguf.header import ggml_types, read_header
from mlxlm.checkpoint.gguf.tensors import _CHUNK, read_tensor
from mlxlm.convert import convert
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model.experts import QuantizedSwitchLinear
from mlxlm.plan import find_config
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.quantized_files import model_file, random_blocks, tensor_file
from tests.small_models import arrays_of, tensors_of

_NO_FLOAT16_SCALE = ("IQ1_M", "MXFP4")  # random bytes make scales of any size
OTHERS = [
    kind.name
    for kind in ggml_types().values()
    if kind.block_size > 1 and kind.name not in (*affine.EXACT_BITS, *_NO_FLOAT16_SCALE)
]
TOKENS = mx.array([[5, 17, 280, 33, 2, 9, 120, 44]])


def both(info):
    """The dequantized matrix, the one in MLX's format, and the bits of that."""
    bits = affine.EXACT_BITS.get(info.type.name, 8)
    packed = affine.pack(info)
    assert [part.dtype for part in packed] == [mx.uint32, mx.float32, mx.float32]
    value = mx.dequantize(*packed, group_size=32, bits=bits, stream=mx.cpu)
    return np.array(read_tensor(info).read()), np.array(value), bits


@pytest.mark.parametrize("kind", affine.EXACT_BITS)
def test_exact_types_have_the_same_weights_to_the_bit(tmp_path, kind):
    rng = np.random.default_rng(0)
    ggml = next(one for one in ggml_types().values() if one.name == kind)
    shape = (_CHUNK // 512 + 3, 512 // ggml.block_size * ggml.type_size)  # rows in more than one part
    info = tensor_file(tmp_path / "m.gguf", kind, rng.integers(0, 256, shape, dtype=np.uint8))
    expected, value, bits = both(info)
    finite = np.isfinite(expected).reshape(-1, 32).all(-1)
    assert finite.mean() > 0.9
    a, b = (x.reshape(-1, 32)[finite] for x in (expected, value))
    assert ((a.view(np.uint32) == b.view(np.uint32)) | ((a == 0) & (b == 0))).all()  # -0.0 may become 0.0
    assert not np.isfinite(value.reshape(-1, 32)[~finite]).all(-1).any()
    assert affine.pack(info)[0].shape == (shape[0], 512 * bits // 32)


@pytest.mark.parametrize("rows", [(), (3,)], ids=["matrix", "experts"])
def test_mxfp4_has_the_same_weights(tmp_path, rows):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (*rows, 5, 4 * 17), dtype=np.uint8)
    blocks[..., ::17] = rng.integers(0, 255, blocks[..., ::17].shape)  # 255 is NaN
    info = tensor_file(tmp_path / "m.gguf", "MXFP4", blocks)
    weight, scales = affine.pack(info)
    assert weight.shape == (*rows, 5, 16) and scales.shape == (*rows, 5, 4) and scales.dtype == mx.uint8
    value = mx.dequantize(weight, scales, mode="mxfp4", dtype=mx.float32, stream=mx.cpu)
    np.testing.assert_array_equal(np.array(value), np.array(read_tensor(info).read()))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_types_are_rounded_to_8_bits(tmp_path, kind):
    rows = _CHUNK // 512 + 3
    info = tensor_file(tmp_path / "m.gguf", kind, random_blocks(kind, rows, 512))
    expected, value, bits = both(info)
    groups = expected.reshape(-1, 32)
    step = (groups.max(-1) - groups.min(-1)) / 255
    assert bits == 8 and (np.abs(value.reshape(-1, 32) - groups).max(-1) <= 1.01 * step + 1e-7).all()
    assert 0 < np.linalg.norm(value - expected) < 6e-3 * np.linalg.norm(expected)


def logits_both_ways(checkpoint, monkeypatch):
    """Logits of the model with quantized layers and of the dequantized one, and the first."""
    monkeypatch.setattr(load, "ON_CPU", False)
    quantized, config = load_checkpoint(checkpoint)
    plain, plain_config = load_checkpoint(checkpoint.with_tensors(checkpoint.tensors))
    assert config.quantization and plain_config.quantization is None
    assert {value.dtype for value in arrays_of(plain).values()} <= {mx.float32, mx.float16}
    return np.array(quantized(TOKENS)), np.array(plain(TOKENS)), quantized


def assert_close(logits, expected, error=1e-5):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=error * np.abs(expected).max())


def formats(model):
    """Module -> bits of the quantized layers."""
    kinds = nn.QuantizedLinear | nn.QuantizedEmbedding
    return {name: module.bits for name, module in model.named_modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("kind", [*affine.EXACT_BITS, "Q2_K", "Q3_K", "Q6_K", "IQ4_XS"])
def test_model_of_each_type_computes_the_same_both_ways(tiny_tokenizer, tmp_path, monkeypatch, kind):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: kind, tie_word_embeddings=True)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    logits, expected, model = logits_both_ways(checkpoint, monkeypatch)
    exact = kind in affine.EXACT_BITS
    assert_close(logits, expected, 1e-5 if exact else 0.05)
    assert set(formats(model).values()) == {affine.EXACT_BITS.get(kind, 8)} and len(formats(model)) == 15
    bits = formats(model)["model.embed_tokens"]
    assert checkpoint.packed.config.quantization == {"group_size": 32, "bits": bits, "mode": "affine"}
    assert find_config(tmp_path / "m.gguf").quantization == checkpoint.packed.config.quantization


def mixed(name):
    """Types as in a Q4_K_M file, and matrices that aren't quantized."""
    if "attn_v" in name or name == "output.weight":
        return "Q8_0"
    return None if "blk.1.ffn_up" in name else "F16" if "blk.1.ffn_gate" in name else "Q4_K"


def test_scales_stay_exact_beside_16_bit_matrices(tiny_tokenizer, tmp_path, monkeypatch):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: "Q4_K" if "ffn_up" in name else "F16")
    _, _, model = logits_both_ways(open_checkpoint(tmp_path / "m.gguf"), monkeypatch)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.scales.dtype == layer.biases.dtype == mx.float32


def test_mixed_types(tiny_tokenizer, tmp_path, monkeypatch):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, mixed)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    logits, expected, model = logits_both_ways(checkpoint, monkeypatch)
    assert_close(logits, expected)
    bits = formats(model)
    others = {"lm_head", "model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"}
    assert {name for name, n in bits.items() if n == 8} == others and len(bits) == 14
    assert not {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"} & bits.keys()
    plain = load_checkpoint(checkpoint.with_tensors(checkpoint.tensors))[0]
    ids, count = TOKENS[0].tolist(), 12  # in the fused products of decoding
    assert list(greedy_tokens(DecodeStep(model), ids, count)) == list(greedy_tokens(DecodeStep(plain), ids, count))
    assert checkpoint.packed.config.quantization == {
        "group_size": 32, "bits": 4, "mode": "affine",
        **dict.fromkeys(others, {"group_size": 32, "bits": 8, "mode": "affine"}),
    }  # fmt: skip


def test_models_of_all_architectures(model, tensors, tiny_tokenizer, tmp_path, monkeypatch):
    """Permuted, fused and grouped rows, biases, position embeddings and norms plus one."""
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "Q4_0")
    logits, expected, quantized = logits_both_ways(open_checkpoint(tmp_path / "m.gguf"), monkeypatch)
    assert_close(logits, expected, 1e-4)
    assert sorted(set(formats(quantized).values())) == [4, 8]
    assert any(name.endswith("self_attn.o_proj") for name in formats(quantized))
    if model.config.num_experts:
        experts = quantized.layers[-1].get("experts", quantized.layers[-1].mlp)
        assert isinstance(experts.switch_mlp.up_proj, QuantizedSwitchLinear)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"], indirect=True)
def test_latent_attention_in_folders_of_mlx(model, tensors, tiny_tokenizer, tmp_path):
    """DeepSeek V2's have one matrix of keys and values there, in 16 bits."""
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "Q8_0")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    is_packed = open_checkpoint(tmp_path / "out").tensors["model.layers.0.self_attn.embed_q.weight"].dtype == mx.uint32
    assert is_packed == (model.config.model_type == "deepseek_v3")
    found, wanted = (load_checkpoint(open_checkpoint(tmp_path / name))[0](TOKENS) for name in ("out", "m.gguf"))
    assert_close(np.array(found), np.array(wanted), 1e-4 if is_packed else 2e-3)


@pytest.mark.parametrize("model", ["deepseek-v2-lite"], indirect=True)
def test_latent_attention_in_older_files(model, tensors, tiny_tokenizer, tmp_path, monkeypatch):
    """They have one matrix of keys and values, which is dequantized."""
    for name in ("attn_k_b", "attn_v_b"):
        monkeypatch.delitem(deepseek2.LAYER, name)
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "Q8_0")
    monkeypatch.undo()
    assert "blk.0.attn_kv_b.weight" in read_header(tmp_path / "m.gguf").tensors
    logits, expected, quantized = logits_both_ways(open_checkpoint(tmp_path / "m.gguf"), monkeypatch)
    assert_close(logits, expected, 1e-4)
    assert not any(name.endswith(("embed_q", "unembed_out")) for name in formats(quantized))


def test_default_is_as_the_device_computes(tiny_tokenizer, tmp_path, monkeypatch):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: "Q4_K", tie_word_embeddings=True)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    model, config = load_checkpoint(checkpoint)
    packed = sum(tensor.nbytes for tensor in checkpoint.packed.tensors.values())
    assert formats(model) and config.quantization
    assert load.weights_memory(checkpoint, config.parameter_count()) == packed
    assert packed == sum(value.nbytes for value in arrays_of(model).values())
    monkeypatch.setattr(load, "ON_CPU", True)
    monkeypatch.setattr(load.platform, "total_memory", lambda: 1.2 * packed)
    with pytest.warns(UserWarning, match="it keeps its dtype, which is slow on a CPU .try: mlxlm quantize with fewer"):
        assert formats(load_checkpoint(checkpoint)[0])


def test_matrices_are_read_once(tiny_tokenizer, tmp_path, monkeypatch):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, mixed)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    packed, reads, pack = checkpoint.packed.tensors, [], affine.pack
    monkeypatch.setattr(affine, "pack", lambda info: reads.append(info) or pack(info))
    save_weights(tmp_path, {name: tensor.read() for name, tensor in packed.items()})
    assert len(reads) == 14
    for name, tensor in packed.items():
        value = tensor.read()
        assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), name


def test_parts_of_one_matrix_are_kept(tiny_tokenizer, tmp_path, monkeypatch):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: "Q5_0", num_hidden_layers=2)
    packed, kept, pack = open_checkpoint(tmp_path / "m.gguf").packed.tensors, [], affine.pack

    def noted(info):
        parts = pack(info)
        kept.extend(map(weakref.ref, parts))
        return parts

    monkeypatch.setattr(affine, "pack", noted)
    for name, tensor in packed.items():
        if tensor.dtype == mx.uint32:
            tensor.read()
            assert [part().shape for part in kept if part() is not None] == [packed[f"{name[:-7]}.scales"].shape] * 2
    assert len(kept) > 6


def test_other_tensors_leave_no_packed_ones(tiny_tokenizer, tmp_path):
    model = model_file(tmp_path / "m.gguf", tiny_tokenizer, mixed)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    other = checkpoint.with_tensors(tensors_of(model))
    assert other.packed is None and checkpoint.packed.packed is None
    assert not formats(load_checkpoint(other)[0])


def test_file_without_quantized_matrices_has_no_packed_form(model, tensors, tiny_tokenizer, tmp_path):
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "F16")
    assert open_checkpoint(tmp_path / "m.gguf").packed is None


@pytest.mark.parametrize("name", ["blk.0.attn_q.scales", "bits.weight", "foo.scales", "foo.biases"])
def test_tensors_that_are_named_like_packed_ones_are_errors(tiny_tokenizer, tmp_path, name):
    info = ("Q8_0", random_blocks("Q8_0", 16, 64))
    model_file(tmp_path / "m.gguf", tiny_tokenizer, mixed, extra={name: info})
    with pytest.raises(CheckpointError, match=r"m.gguf: the weights don't match.*is not part of this model"):
        open_checkpoint(tmp_path / "m.gguf")


def test_file_truncated_after_opening(tiny_tokenizer, tmp_path):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, mixed)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="m.gguf has become shorter"):
        checkpoint.packed.tensors["lm_head.scales"].read()
