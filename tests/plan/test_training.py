"""The training settings: attention paths, computed keys, batches of each device."""

import tracemalloc
from dataclasses import replace

import pytest

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.families import load_preset
from mlxlm.plan import Training, count_training_flops


@pytest.mark.parametrize(
    ("device", "path"), [("cpu", "blockwise"), ("metal", "blockwise"), ("cuda", "fused")]
)  # fmt: skip
def test_attention_path_of_a_device(device, path):
    """Long sequences; ALiBi, which MLX's own attention doesn't have; and what is in blocks of the device's size."""
    config, training = load_preset("5m"), Training(dtype="bfloat16", device=device)
    long = replace(training, max_seq_length=1024)
    assert (training.attention_path(config), long.attention_path(config)) == ("plain", path)
    assert replace(training, max_seq_length=512).attention_path(config.with_changes(positions="alibi")) == "blockwise"
    assert replace(training, attention="fused").attention_path(config) == "fused"
    expected = (8 if device == "cpu" else 256) << 20
    assert replace(long, batch_size=1 << 20).loss_rows(4096) == expected // (4 * 4096)


def test_each_device_has_its_own_batch():
    one, three = (
        mlxlm.plan("5m", machine="a100", num_devices=n, batch_size=16, grad_accumulation_steps=2) for n in (1, 3)
    )
    assert (three.memory, three.fits) == (one.memory, one.fits)
    assert three.flops.tokens_per_step == 3 * one.flops.tokens_per_step == 3 * 16 * 2 * 256
    assert three.duration.seconds == pytest.approx(one.duration.seconds / 3)
    assert three.duration.seconds_per_step == pytest.approx(one.duration.seconds_per_step)


def test_keys_computed_with_a_window():
    """On a CPU those that any row of a block sees, on a GPU the whole square; as many where there is no window."""
    config = load_preset("1m").with_changes(sliding_window=64)
    training = Training(max_seq_length=512, device="cpu", attention="plain")
    assert training.keys_computed(config) == (128 + 3 * (128 + 64 - 1)) / 4
    assert training.keys_computed(config.with_changes(sliding_window=None)) == (128 + 256 + 384 + 512) / 4
    square = replace(training, device="cuda")
    assert square.keys_computed(config) == 512 and count_training_flops(config, square).computed_fraction == 8
    assert replace(training, attention="fused").keys_computed(config) == 64
    assert replace(training, attention="blockwise").keys_computed(config) == (64 + 7 * (64 + 64 - 1)) / 8
    assert replace(training, max_seq_length=300).keys_computed(config) == (75 + 3 * (75 + 64 - 1)) / 4


def test_keys_computed_of_a_long_sequence_take_no_memory():
    training = Training(max_seq_length=1 << 20, device="cpu", attention="blockwise")
    config = load_preset("1m")
    training.keys_computed(config)  # imports
    tracemalloc.start()
    training.keys_computed(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e5


def test_kept_masks_match_keys_computed(monkeypatch):
    """Beside the masks that attention makes."""
    from mlxlm.kernels import mlx_attention as module

    kept = []
    monkeypatch.setattr(module, "ON_CPU", True)
    monkeypatch.setattr(module, "_attend", lambda rows, keys, values, mask: (kept.append(mask.size), [rows])[1])
    heads = mx.zeros((1, 4, 300, 8))
    module.mlx_attention(heads, heads, heads, 1.0, window=20)
    config = ModelConfig(32, 1, 4, 8, 8, sliding_window=20)
    training = Training(max_seq_length=300, device="cpu", attention="plain")
    assert sum(kept) == round(300 * training.keys_computed(config))
