"""Memory for inference: bits of weights and cache, quantized models."""

import pytest

import mlxlm
from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.catalog import default_entry
from mlxlm.config.quantization import module_quantization
from mlxlm.families import load_preset
from mlxlm.model import Decoder
from mlxlm.plan.advice import entry_fit
from mlxlm.plan.inference import default_serving
from mlxlm.plan.machines import MACHINES, Machine


def test_default_dtypes_of_a_device():
    config = load_preset("5m")
    cpu = Machine("here", 1e9, "float32", None, True, "", "cpu")
    this_machine = default_serving(cpu, config)
    assert (this_machine.bits, this_machine.kv_bits, this_machine.context_length) == (32, 32, 512)
    assert default_serving(MACHINES["a100"], config).bits == 16
    for machine, dtype in ((cpu, "float32"), (MACHINES["a100"], "bfloat16"), (MACHINES["m1"], "bfloat16")):
        assert mlxlm.plan(config, machine=machine).training.dtype == dtype
    assert mlxlm.plan(config, machine="a100", dtype="float32").training.dtype == "float32"


def test_weights_on_a_cpu_are_float32_if_they_fit():
    config = load_preset("5m")
    count = config.parameter_count()
    for memory, float_bits in ((6 * count, 32), (5 * count, 16)):  # bytes
        machine = Machine("here", 1e9, "float32", memory, True, "", "cpu")
        planned = mlxlm.plan(config, machine=machine)
        assert (planned.serving.bits, planned.serving.kv_bits) == (float_bits, float_bits)
        assert planned.inference.weights == count * float_bits // 8
        planned = mlxlm.plan(config, machine=machine, bits=4)
        assert (planned.serving.bits, planned.serving.kv_bits) == (4, 32)  # the scales have 32 bits there
        planned = mlxlm.plan(
            config.with_changes(quantization={"bits": 4, "group_size": 32, "mode": "mxfp4"}), machine=machine
        )
        assert planned.serving.bits == (32 if float_bits == 32 else 4)  # dequantized if it fits
        planned = mlxlm.plan(config, machine=machine, bits=4)
    assert mlxlm.plan(config, machine=machine, kv_bits=8).serving.kv_bits == 8
    gpu = mlxlm.plan(config, machine="a100", bits=4)
    assert gpu.serving.bits == 4 and gpu.inference.weights < planned.inference.weights  # scales of 16 and of 32 bits


@pytest.mark.parametrize(
    "quantization",
    [
        {"bits": 4, "group_size": 32},
        {"bits": 8, "group_size": 32, "mode": "mxfp8"},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
        {"bits": 4, "group_size": 64, "model.layers.1.mlp.down_proj": {"bits": 6, "group_size": 32}},
        {"bits": 2, "group_size": 64, "model.embed_tokens": False, "lm_head": {"mode": "mxfp8"}},
    ],
)
def test_quantized_model_keeps_its_formats(quantization):
    """Beside the arrays of MLX's own quantization."""
    config = load_preset("0.3m", tie_word_embeddings=False, hidden_size=192, quantization=quantization)
    model = Decoder(config)
    model.apply(lambda x: x.astype(mx.bfloat16))
    nn.quantize(
        model, class_predicate=lambda name, m: hasattr(m, "to_quantized") and module_quantization(quantization, name)
    )
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    planned = mlxlm.plan(config, machine="a100")
    assert (planned.serving.bits, planned.serving.group_size) == (quantization["bits"], None)
    assert planned.serving.kv_bits == 16 and planned.inference.weights == held
    other = mlxlm.plan(config, machine="a100", bits=5)
    assert 5 < other.inference.bits_per_weight < 6.1


def test_indivisible_matrices_stay_unquantized():
    """As mlx_lm leaves it, which says so only by the files having no scales."""
    config = load_preset("0.3m")
    own = mlxlm.plan(config.with_changes(quantization={"group_size": 64, "bits": 4}), machine="a100").inference
    down = 3 * 96 * 256  # of 256 in a row; all others have 96
    assert own.weights == 2 * (config.parameter_count() - down) + down // 2 + down // 64 * 4
    assert mlxlm.plan(config, machine="a100", bits=4).inference.weights < own.weights  # in groups of 32


def test_learned_positions_are_quantized():
    rope = load_preset("0.3m")
    table = 96 * rope.max_position_embeddings
    plans = [mlxlm.plan(c, machine="a100", bits=8) for c in (rope, rope.with_changes(positions="learned"))]
    assert plans[1].inference.weights - plans[0].inference.weights == table + table // 32 * 4


def test_caches_of_layers_with_other_sizes():
    """Gemma 4: full attention has fewer and larger heads, and the last two layers have no cache."""
    config = load_preset("5m").with_changes(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, global_head_dim=64,
        num_global_key_value_heads=1, num_hidden_layers=6, num_kv_shared_layers=2, sliding_window=100,
        layer_types=("sliding_attention", "sliding_attention", "full_attention") * 2, max_position_embeddings=4096,
    )  # fmt: skip
    for kind, cache in mlxlm.plan(config, machine="a100", context_length=4000).inference.caches.items():
        local, full = {"multi-head": (4, 4), "multi-query": (1, 1)}.get(kind, (2, 1))
        window = 100 + 64 + 64 if "window" in kind else 4000
        assert cache == 2 * 2 * (3 * local * 32 * window + full * 64 * 4000), kind


def test_the_memory_of_a_chat():
    cpu = Machine("here", 1e9, "float32", None, True, "", "cpu")
    assert 1.45e9 < entry_fit(default_entry(), cpu).memory < 1.6e9  # 1.45 GB were resident after 4,000 tokens
