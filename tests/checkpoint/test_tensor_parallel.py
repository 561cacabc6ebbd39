"""Parts of checkpoints for several processes: their logits together, what each reads, and what can't be split."""

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
}  # fmt: skip
TOKENS = mx.array([[5, 17, 3, 42, 8, 60, 2, 11, 29, 33, 7, 1], [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


def logits_of(model):
    """Of a prompt, and token by token after it, with a cache."""
    cache = make_cache(model)
    parts = [model(TOKENS[:, :7], cache=cache)] + [model(TOKENS[:, i : i + 1], cache=cache) for i in range(7, 12)]
    return np.array(mx.concatenate(parts, axis=1))


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
        np.testing.assert_allclose(part, whole, rtol=0, atol=1e-4 * whole.std())


@pytest.mark.parametrize("bits", [None, 4])
def test_a_process_reads_its_part_of_the_file(bits, tmp_path, monkeypatch):
    model = random_model(attention_bias=True)
    weights, config = arrays_of(model), {}
    if bits is not None:
        weights, quantization = quantized_weights(model, bits, 32)
        config["quantization"] = quantization
    folder = write_folder(tmp_path / "model", weights, model.config, **config)
    whole = open_checkpoint(folder)
    expected = logits_of(load_checkpoint(whole)[0])
    sizes = {name: tensor.nbytes for name, tensor in whole.tensors.items()}
    split = {name for name in sizes if "_proj" in name and not name.endswith("o_proj.bias")}
    part = split_checkpoint(whole, 1, 2)
    assert {name for name, tensor in part.tensors.items() if tensor.nbytes < sizes[name]} == split
    assert all(part.tensors[name].nbytes == sizes[name] // 2 for name in split)
    monkeypatch.setattr("mlxlm.checkpoint.safetensors._LazyArrays.read", read := Recorder(_LazyArrays.read))
    for logits in run_split(lambda: open_checkpoint(folder), 2, logits_of):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * expected.std())
    assert read.names and not read.names & split


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
        ({"qk_norm": "projection"}, 2, "norms of llama with weights for all heads"),
    ],
)
def test_what_processes_cannot_share(fields, size, expected):
    with pytest.raises(ConfigError, match=expected):
        split_config(ModelConfig(**{**BASE, **fields}), size)


def test_groups_of_quantized_inputs_stay_whole(tmp_path):
    model = random_model(intermediate_size=96)
    weights, quantization = quantized_weights(model, 4, 32)
    folder = write_folder(tmp_path / "model", weights, model.config, quantization=quantization)
    problem = r"mlp.down_proj.scales is \[64, 3\], whose groups of quantized inputs 2 processes can't share equally"
    with pytest.raises(CheckpointError, match=problem):
        split_checkpoint(open_checkpoint(folder), 0, 2)


def test_a_file_that_has_become_shorter(tmp_path):
    folder = write_folder(tmp_path / "model", random_model(), ModelConfig(**BASE))
    part = split_checkpoint(open_checkpoint(folder), 0, 2).tensors
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError, match="has become shorter"):
        part["model.layers.1.self_attn.q_proj.weight"].read()
