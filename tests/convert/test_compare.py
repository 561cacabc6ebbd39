"""Comparisons against the same numbers computed from whole models with numpy."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import save_weights
from mlxlm.checkpoint.checkpoint import Checkpoint, MlxLmCheckpoint
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert import compare as module
from mlxlm.convert.compare import compare, tensor_diff
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import write_json
from tests.small_models import arrays_of, in_memory, random_decoder


@pytest.fixture
def model(tiny_config):
    model = random_decoder(tiny_config.with_changes(num_hidden_layers=3))
    model.eval()
    return model


@pytest.fixture
def tokens():
    return mx.random.randint(0, 300, (120,), key=mx.random.key(3)).tolist()


def noisy(model: Decoder, name: str) -> dict:
    value = arrays_of(model)[name]
    return {name: value + 0.02 * mx.random.normal(value.shape, key=mx.random.key(9))}


@pytest.mark.parametrize("stride", [50, 20])
def test_the_numbers(model, tokens, monkeypatch, stride):
    monkeypatch.setattr(module, "_MAX_LOGITS", 300 * 7)  # many small pieces
    changed = noisy(model, "model.layers.1.mlp.up_proj.weight")
    both = in_memory(model, "a"), in_memory(model, "b", **changed)
    found = compare(*both, [tokens], text_bytes=400, context_length=50, stride=stride)
    other = Decoder(model.config)
    other.load_weights(list((arrays_of(model) | changed).items()))
    other.eval()
    sums = np.zeros(4)
    done = 1
    for start in range(0, 119, stride):
        ids, new = tokens[start : start + 51], slice(done - start - 1, None)
        logits = [np.array(m(mx.array([ids[:-1]])))[0].astype(np.float64) for m in (model, other)]
        log_a, log_b = ((x - np.log(np.exp(x).sum(-1, keepdims=True)))[new] for x in logits)
        targets = ids[1:][new]
        rows = np.arange(len(targets))
        sums += [
            (np.exp(log_a) * (log_a - log_b)).sum(), -log_a[rows, targets].sum(), -log_b[rows, targets].sum(),
            (log_a.argmax(-1) == log_b.argmax(-1)).sum(),
        ]  # fmt: skip
        done = start + len(ids)
        if done == len(tokens):
            break
    assert (found.tokens, found.context_length, found.stride) == (119, 50, stride)
    assert found.kl == pytest.approx(sums[0] / 119, rel=1e-3)
    assert found.loss_a == pytest.approx(sums[1] / 119, rel=1e-5)
    assert found.loss_b == pytest.approx(sums[2] / 119, rel=1e-5)
    assert found.top1_agreement == sums[3] / 119
    assert found.bits_per_byte_b == pytest.approx(sums[2] / np.log(2) / 400, rel=1e-5)
    assert found.first_different_layer == "model.layers.1" and found.worst_layers(1) == ["model.layers.1"]
    assert found.layers["model.embed_tokens"] == found.layers["model.layers.0"] == 0 < found.layers["model.layers.1"]
    assert not found.identical and not found.equal_to_rounding and found.max_logit_error > 0


def test_a_model_is_identical_to_itself(model, tokens):
    calls = []
    found = compare(in_memory(model, "a"), in_memory(model, "b"), [tokens], progress=lambda *at: calls.append(at))
    assert found.identical and found.kl < 1e-6 and found.top1_agreement == 1 and found.first_different_layer is None
    assert found.bits_per_byte_a is None and calls[-1] == (5, 5)


@pytest.mark.parametrize("size", [1e-5, 1e-3, 0.1, 30.0])
def test_small_and_large_divergences_are_exact(size):
    """In double precision, where nothing cancels; float32's rounding of p and q is 1e-7 of each logit."""
    a = np.random.default_rng(0).normal(size=(4, 300))
    b = a + size * np.random.default_rng(1).normal(size=a.shape)
    targets = mx.zeros((4,), mx.int32)
    sums, _ = module._sums(mx.array(a.astype(np.float32)), mx.array(b.astype(np.float32)), targets)
    log_a, log_b = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, b))
    assert sums[0] == pytest.approx((np.exp(log_a) * (log_a - log_b)).sum(), rel=0.05 if size < 1e-4 else 1e-3)
    sums, _ = module._sums(mx.array(a), mx.array(np.where(a > 1, -1e4, a)), targets)
    assert np.isfinite(sums[0])


def test_models_of_other_depths_are_compared_by_their_logits(model, tokens):
    smaller = random_decoder(model.config.with_changes(num_hidden_layers=1, hidden_size=16, head_dim=8), 1)
    found = compare(in_memory(model, "a"), in_memory(smaller, "b"), [tokens])
    assert found.layers == {} and found.kl > 0 and not found.identical


def test_models_that_can_not_be_compared(model, tokens, tiny_config):
    other = Decoder(tiny_config.with_changes(vocab_size=301))
    with pytest.raises(CheckpointError, match="a has a vocabulary of 300 tokens and b one of 301"):
        compare(in_memory(model, "a"), in_memory(other, "b"), [tokens])
    with pytest.raises(CheckpointError, match="fewer than two tokens"):
        compare(in_memory(model, "a"), in_memory(model, "b"), [[1]])
    with pytest.raises(CheckpointError, match="ids outside the vocabulary"):
        compare(in_memory(model, "a"), in_memory(model, "b"), [[1, 300]])
    broken = {"model.layers.2.mlp.up_proj.weight": mx.full((64, 32), float("nan"))}
    with pytest.raises(CheckpointError, match="b: values after model.layers.2 are not finite"):
        compare(in_memory(model, "a"), in_memory(model, "b", **broken), [tokens])


def test_weights_beside_weights(model):
    name = "model.layers.1.mlp.up_proj.weight"
    arrays = mx.quantize(model.layers[1].mlp.up_proj.weight, 32, 8)
    packed = dict(zip(("weight", "scales", "biases"), arrays, strict=True))
    a = in_memory(model, "a")
    config = model.config.with_changes(quantization={"group_size": 32, "bits": 8, "mode": "affine"}, rope_theta=5e4)
    tensors = {n: t for n, t in a.tensors.items() if n != "model.norm.weight"}
    tensors |= {f"{name.removesuffix('.weight')}.{part}": lazy_tensor(value) for part, value in packed.items()}
    tensors["model.extra.weight"] = lazy_tensor(mx.ones(3))
    b = Checkpoint("b", "safetensors", {}, tensors, None, config)
    found = tensor_diff(a, b)
    assert {n for n, error in found.tensors.items() if error} == {name} and 1e-4 < found.tensors[name] < 1e-2
    assert found.only_a == ["model.norm.weight"] and found.only_b == ["model.extra.weight"] and not found.equal
    assert found.config == {"rope_theta": (10000.0, 5e4)}
    assert found.bits_per_weight_a == 32 and found.nbytes_b < found.nbytes_a
    assert tensor_diff(a, a).equal


def test_models_of_mlx_lm_are_compared_by_what_they_say(tmp_path):
    mamba = pytest.importorskip("mlx_lm.models.mamba")
    values = {
        "model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
        "state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2,
    }  # fmt: skip
    found = []
    for seed in (0, 1):
        mx.random.seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        save_weights(folder, arrays_of(mamba.Model(mamba.ModelArgs(**values))))
        write_json(folder / "config.json", values)
        found.append(open_checkpoint(folder))
    a, b = found
    assert isinstance(a, MlxLmCheckpoint)
    same, other = (compare(a, x, [list(range(40))], context_length=16, stride=16) for x in (a, b))
    assert same.identical and same.layers == {} and same.tokens == 39
    assert other.kl > 0.01 and not other.equal_to_rounding
    apart = tensor_diff(a, b)
    assert not apart.equal and apart.config == {} and apart.bits_per_weight_a == 32
