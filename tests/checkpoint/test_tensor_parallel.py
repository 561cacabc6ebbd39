"""Parts of checkpoints for several processes: their logits together, what each reads, and what can't be split."""

import math

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import make_cache
from mlxlm.checkpoint import open_checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.safetensors import _LazyArrays
from mlxlm.checkpoint.tensor_parallel import split_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.tensor_parallel import split_config
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.quantized_weights import quantized_weights
from tests.small_models import arrays_of, in_memory, random_decoder, write_folder
from tests.split_model import run_split

BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {
    "grouped-query": {"qk_norm": "head", "attention_bias": True, "sliding_window": 8},
    "biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False,
               "norm": "layer", "positions": "learned", "hidden_act": "gelu"},
    "parallel": {"parallel_residual": True, "shared_norm": True, "norm": "layer", "positions": "alibi"},
    "norms of outputs": {"norm_placement": "both", "tie_word_embeddings": True, "residual_multiplier": 0.5},
    "experts": {**EXPERTS, "shared_expert_intermediate_size": 32, "shared_expert_gate": True,
                "mlp_layer_types": ["dense", "sparse"]},
    "sinks and gates": {**EXPERTS, "attention_sinks": True, "attn_output_gate": True, "mlp_bias": True,
                        "router_bias": True, "swiglu_limit": 7.0},
    "norms over all heads": {"qk_norm": "projection"},
    "norms of each head": {"qk_norm": "layer_per_head"},
    "scaled inputs of experts": {**EXPERTS, "router": "input_sigmoid", "shared_expert_intermediate_size": 32},
    "latent attention": {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4, "attention_bias": True, **EXPERTS, "router": "sigmoid",
    },
    "short convolutions": {"layer_types": ("conv", "full_attention"), "conv_bias": True},
    "gated delta rule": {
        "layer_types": ("linear_attention", "full_attention"), "linear_num_value_heads": 8, "linear_num_key_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    },
    "Mamba 2 without a feed-forward": {
        "layer_types": ("mamba", "full_attention"), "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 12,
        "mlp_layer_types": ["none", "dense"],
    },
    "Mamba 2 with groups": {
        "layer_types": ("mamba", "full_attention"), "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 12,
        "mamba_n_groups": 4, "mamba_proj_bias": True,
    },
}  # fmt: skip
TOKENS = mx.array([[5, 17, 3, 42, 8, 60, 2, 11, 29, 33, 7, 1], [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


def logits_of(model):
    """Of a prompt, and of single tokens after it, by the model and by decoding steps, which aren't compiled so soon."""
    cache, step = make_cache(model), DecodeStep(model)
    parts = [model(TOKENS[:, :7], cache=cache)] + [model(TOKENS[:, i : i + 1], cache=cache) for i in range(7, 9)]
    return np.array(mx.concatenate(parts + [step(TOKENS[:, i : i + 1], cache)[:, None] for i in range(9, 12)], axis=1))


def close(found, wanted):
    tolerance = 1e-4 if wanted.dtype == np.float32 else 0.02  # quantized models have scales of 16 bits on a GPU
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * wanted.std())


def random_model(**fields):
    """A random model whose biases aren't zero."""
    model = random_decoder(ModelConfig(**{**BASE, **fields}))
    biases = [(n, mx.random.normal(x.shape, key=mx.random.key(i)))
              for i, (n, x) in enumerate(arrays_of(model).items()) if n.endswith(("bias", "sinks"))]  # fmt: skip
    model.load_weights(biases, strict=False)
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_give_the_logits_of_the_whole(kind, size):
    """Four processes share two key-value heads."""
    model = random_model(**KINDS[kind])
    whole = logits_of(model)
    for part in run_split(lambda: in_memory(model), size, logits_of):
        close(part, whole)
    part = split_checkpoint(in_memory(model), size - 1, size)
    assert part.config.parameter_count() == sum(math.prod(tensor.shape) for tensor in part.tensors.values())


@pytest.mark.parametrize(("bits", "kind"), [(None, "grouped-query"), (4, "grouped-query"), (4, "short convolutions")])
def test_a_process_reads_its_part_of_the_file(bits, kind, tmp_path, monkeypatch):
    model = random_model(**KINDS[kind])
    weights, config = arrays_of(model), {}
    if bits is not None:
        weights, quantization = quantized_weights(model, bits, 32)
        config["quantization"] = quantization
    folder = write_folder(tmp_path / "model", weights, model.config, **config)
    whole = open_checkpoint(folder)
    expected = logits_of(load_checkpoint(whole)[0])
    sizes = {name: tensor.nbytes for name, tensor in whole.tensors.items()}
    whole_biases = ("o_proj.bias", "out_proj.bias")
    split = {name for name in sizes if ("_proj" in name or ".conv.conv" in name) and not name.endswith(whole_biases)}
    part = split_checkpoint(whole, 1, 2)
    assert {name for name, tensor in part.tensors.items() if tensor.nbytes < sizes[name]} == split
    assert all(part.tensors[name].nbytes == sizes[name] // 2 for name in split)
    monkeypatch.setattr("mlxlm.checkpoint.safetensors._LazyArrays.read", read := Recorder(_LazyArrays.read))
    for logits in run_split(lambda: open_checkpoint(folder), 2, logits_of):
        close(logits, expected)
    assert read.names and not {name for name in read.names & split if ".conv.conv" not in name}


class Recorder:
    """A method that notes the names of the tensors it reads."""

    def __init__(self, method):
        self.method, self.names = method, set()

    def __get__(self, owner, _type):
        return lambda name: self.names.add(name) or self.method(owner, name)


def test_biases_of_sums_are_added_once():
    model = random_model(**KINDS["biases"])
    parts = [split_checkpoint(in_memory(model), rank, 2).tensors for rank in range(2)]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        first, second = (part[f"model.layers.0.{name}.bias"].read() for part in parts)
        assert mx.array_equal(first, arrays_of(model)[f"model.layers.0.{name}.bias"]) and not second.any().item()


@pytest.mark.parametrize(
    ("fields", "size", "expected"),
    [
        ({}, 3, r"3 processes can't share num_attention_heads 4, intermediate_size 128, .* equally \(try: 2\)"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}, 4, r"heads 6, .*\(try: 2\)"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, 2, "num_key_value_heads 3"),
        ({**EXPERTS, "moe_intermediate_size": 33}, 2, r"moe_intermediate_size 33 equally \(try: one machine\)"),
        ({**KINDS["Mamba 2 with groups"], "mamba_n_groups": 2}, 4, r"mamba_n_groups 2 equally \(try: 2\)"),
        ({"layer_types": ("conv", "full_attention"), "hidden_size": 72, "head_dim": 16}, 16, "conv_dim 72"),
    ],
)
def test_what_processes_cannot_share(fields, size, expected):
    with pytest.raises(ConfigError, match=expected):
        split_config(ModelConfig(**{**BASE, **fields}), size)


def test_groups_that_cannot_be_shared_are_dequantized(tmp_path):
    model = random_model(intermediate_size=96)
    weights, quantization = quantized_weights(model, 4, 32)
    folder = write_folder(tmp_path / "model", weights, model.config, quantization=quantization)
    part = split_checkpoint(open_checkpoint(folder), 0, 2)
    assert part.tensors["model.layers.0.mlp.down_proj.weight"].shape == (64, 48)
    assert "model.layers.0.mlp.up_proj.scales" in part.tensors
    whole = logits_of(load_checkpoint(open_checkpoint(folder))[0])
    for logits in run_split(lambda: open_checkpoint(folder), 2, logits_of):
        close(logits, whole)


def test_a_file_that_has_become_shorter(tmp_path):
    folder = write_folder(tmp_path / "model", random_model(), ModelConfig(**BASE))
    part = split_checkpoint(open_checkpoint(folder), 0, 2).tensors
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError, match="has become shorter"):
        part["model.layers.1.self_attn.q_proj.weight"].read()
