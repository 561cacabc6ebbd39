"""Importance weights are mean squares of inputs, and reach the rows of a GGUF file that they belong to."""

import numpy as np
import pytest
from gguf import GGUFReader

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, open_checkpoint
from mlxlm.checkpoint.gguf.k_quants import USE_IMPORTANCE, quantize_k
from mlxlm.convert import convert
from mlxlm.quantize import importance_weights
from mlxlm.quantize.calibrate import ExpertInputs, calibrate_layers, recording
from mlxlm.quantize.calibration_text import text_of_file
from mlxlm.quantize.layers import layers_of
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.utils.errors import ArgumentError

MIXTRAL = {
    "model_type": "mixtral", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(write_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral") / "model"
    write_model(folder, hidden_size=256, intermediate_size=256, num_hidden_layers=1, **MIXTRAL)
    return folder


@pytest.mark.parametrize("source", ["model", "mixtral"])
def test_they_are_the_diagonals_of_moments(source, request, texts):
    folder = request.getfixturevalue(source)
    found = importance_weights(folder, texts[0])
    tokens = text_of_file(texts[0], load_tokenizer(folder), 10**6)
    windows, wanted = tokens.windows(128, 2048), {}

    def on_layer(name, layer, run, source_inputs):
        with recording(layer) as inputs:
            output = run()
            mx.eval(output)
        for matrix, stats in inputs.items():
            if isinstance(stats, ExpertInputs):
                counts_and_stats = [stats.of(expert) for expert in range(5)]
                wanted[f"{name}.{matrix}"] = [
                    np.diag(s.moments) / n if n else np.ones(256) for n, s in counts_and_stats
                ]
            else:
                wanted[f"{name}.{matrix}"] = np.diag(stats.moments) / windows.size
        return output

    calibrate_layers(layers_of(open_checkpoint(folder)), windows, on_layer)
    assert found.keys() == wanted.keys() and len(found) == (14 if source == "model" else 8)
    for name, value in found.items():
        np.testing.assert_allclose(value, np.array(wanted[name]), rtol=1e-4)
    model = load_model(folder)[0]
    hidden = np.array(model.model.embed_tokens.weight).astype(np.float64)[windows.reshape(-1)]
    hidden *= np.array(model.layers[0].input_layernorm.weight) / np.sqrt(
        np.square(hidden).mean(-1, keepdims=True) + 1e-5
    )
    np.testing.assert_allclose(found["model.layers.0.self_attn.q_proj"], np.square(hidden).mean(0), rtol=1e-3)


def test_rows_of_a_file_are_rounded_with_them(mixtral, texts, tmp_path):
    importance = importance_weights(mixtral, texts[0])
    importance |= {name: np.square(value) for name, value in importance.items()}  # to tell them from one another
    convert(mixtral, tmp_path / "f32.gguf", outtype="F32", verify_output=False)
    report = convert(mixtral, tmp_path / "m.gguf", outtype="Q4_K_M", importance=importance)
    assert {check.result for check in report.checks} <= {"equal", "within rounding"}
    whole, plain = ({t.name: t for t in GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("m", "f32"))
    modules = {"attn_k": "self_attn.k_proj", **{f"ffn_{n}_exps": f"mlp.switch_mlp.{n}_proj" for n in ("gate", "down")}}
    for name, module in modules.items():
        columns = importance[f"model.layers.0.{module}"].reshape(-1, 256)
        stored, values = (tensors[f"blk.0.{name}.weight"] for tensors in (whole, plain))
        kind, weights = stored.tensor_type.name, values.data.reshape(-1, 256)
        assert kind in USE_IMPORTANCE
        of_rows = np.repeat(columns, len(weights) // len(columns), axis=0)
        np.testing.assert_array_equal(stored.data.reshape(len(weights), -1), quantize_k(weights, kind, of_rows))


def test_types_without_them_are_errors(model, tmp_path):
    for out, outtype in (("m.gguf", "Q8_0"), ("m.gguf", None), ("folder", None)):
        with pytest.raises(ArgumentError, match="`importance` would have no effect"):
            convert(model, tmp_path / out, outtype=outtype, importance={"a": np.ones(2)})
