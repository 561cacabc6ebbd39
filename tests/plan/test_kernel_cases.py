"""What a model is said to ask its kernels for is what training and generation look up, in any dtype."""

import json

import numpy as np
import pytest

from mlxlm import batch, generate
from mlxlm.backend.mlx import mx, tree_map
from mlxlm.cache import KVOptions
from mlxlm.cli.main import _run
from mlxlm.config import ModelConfig
from mlxlm.data import Batch
from mlxlm.families import config_to_hf
from mlxlm.generation import LoadedModel
from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.attention import DECODE, PREFILL, TRAINING
from mlxlm.kernels.bench import Measurement, Timing
from mlxlm.kernels.dispatch import Operation
from mlxlm.kernels.quantile import QUANTILE
from mlxlm.model import Decoder
from mlxlm.plan.kernel_cases import cases_of, generation_cases, training_cases
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("new_machine")


@pytest.fixture
def looked_up(monkeypatch):
    """The cases that are looked up, on a device without Metal."""
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    seen, found = set(), Operation.implementation
    monkeypatch.setattr(Operation, "implementation", lambda self, case: seen.add(case) or found(self, case))
    return seen


def model_of(config, dtype):
    model = Decoder(config)
    model.init_weights(seed=0)
    model.update(tree_map(lambda weight: weight.astype(getattr(mx, dtype)), model.trainable_parameters()))
    return model


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", [{}, {"qk_norm": "head", "norm_unit_offset": True}], ids=str)
def test_cases_of_a_training_step(tiny_config, change, masked, looked_up, monkeypatch):
    """Of a device that trains in bfloat16, all rows at once."""
    monkeypatch.setattr("mlxlm.train.step.num_batch_shards", lambda rows: 1)
    config = tiny_config.with_changes(**change)
    settings = TrainSettings(dtype="bfloat16", batch_size=2, max_seq_length=16, steps=1, learning_rate=1e-3)
    tokens = np.zeros((2, 17), np.int32)
    step = TrainStep(model_of(config, "float32").train(), settings)
    mx.eval(step([Batch(tokens, tokens[:, :16] if masked else None, None)], 1e-3), step.state)
    asked = set(looked_up)
    assert asked == set(training_cases(model_of(config, "bfloat16").train(), 2, 16, masked))
    assert asked <= {case for _, case in cases_of(config, "float16", "bfloat16")}
    assert {case.dtype for case in asked} == {"bfloat16"}


@pytest.mark.parametrize("bits", [None, "8"])
def test_cases_of_generation(tiny_config, tiny_tokenizer, bits, looked_up, tmp_path):
    config = tiny_config.with_changes(head_dim=32)  # which can be quantized
    model, kv = model_of(config, "float16").eval(), KVOptions.of(bits=bits)
    lm = LoadedModel(model, tiny_tokenizer, config, tmp_path)
    generate(lm, [5] * 20, max_tokens=3, temperature=0, kv=kv)
    asked = set(looked_up)
    assert asked == set(generation_cases(model, 20, kv))
    # The first may be read before the others are there.
    texts = list(batch(lm, [[5] * 20, [6] * 13, [7] * 9, [8] * 11], max_tokens=3, temperature=0))
    asked = set(looked_up)
    assert len(texts) == 4 and any("first" in case.features for case in asked)
    assert {case.dtype for case in asked} == {"float16"}
    assert asked <= {case for _, case in cases_of(config, "float16", "bfloat16")}


def test_cases_have_windows_softcaps_and_slopes():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    windows = {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")}
    capped = cases_of(ModelConfig(**sizes, vocab_size=9, **windows, attn_logit_softcapping=5.0), "float16", "bfloat16")
    alone = {case.features for operation, case in capped if operation is DECODE and "first" not in case.features}
    assert alone == {("softcap",), ("window", "softcap")}
    bloom = cases_of(ModelConfig(**sizes, vocab_size=9, norm="layer", positions="alibi"), "float16", "bfloat16")
    assert all("slopes" in case.features for operation, case in bloom if operation is not QUANTILE)


def test_bench_and_list_commands(tmp_path, tiny_config, looked_up, monkeypatch, capsys):
    monkeypatch.setattr("mlxlm.train.start.DEVICE_DTYPE", "bfloat16")

    def benchmark(operation, case, num_repeats):
        return Measurement(case, {"mlx": Timing([0.001], 0.0, 0)}, {}, "mlx")

    monkeypatch.setattr("mlxlm.kernels.bench.benchmark", benchmark)
    small = tiny_config.with_changes(hidden_size=16, max_position_embeddings=32)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(small)))
    assert _run(["kernels", "bench", str(tmp_path), "--dtype", "float16", "--repeats", "1", "--json"]) == 0
    measured = [found["case"] for found in json.loads(capsys.readouterr().out)["cases"]]
    training = training_cases(model_of(small, "bfloat16").train(), 1, 32, document_mask=False)
    generation = generation_cases(model_of(small, "float16").eval(), 32)
    assert {str(case) for case in (*training, *generation)} <= set(measured)
    assert all(measurements.fastest_path(case) for case in measured)
    assert _run(["kernels", "list", str(tmp_path), "--dtype", "float16", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["operations"]
    assert [row["case"] for row in listed] == measured and all("measured" in row["why"] for row in listed)


def test_latent_attention_has_no_kernel_of_its_own(tiny_config):
    """In training and prompts values have another head dim than keys, and nothing is looked up in decoding."""
    config = tiny_config.with_changes(
        num_key_value_heads=tiny_config.num_attention_heads, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16,
    )  # fmt: skip
    cases = [(operation, case) for operation, case in cases_of(config, "float16", "bfloat16") if "D" in case.names]
    cases = [(operation, case) for operation, case in cases if case.size("D") == 24]
    assert {operation for operation, _ in cases} == {PREFILL, TRAINING}
    assert all(case.size("V") == 16 and operation.unsupported_reason("metal", case) for operation, case in cases)
