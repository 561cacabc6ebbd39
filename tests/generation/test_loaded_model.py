"""Loading a model for generation."""

import pytest

from mlxlm.backend import device
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.families import config_to_hf
from mlxlm.generation import load
from mlxlm.model import Decoder
from mlxlm.utils.json_files import write_json


@pytest.fixture
def save(lm, tmp_path):
    def save(scale=1.0):
        model = Decoder(lm.config)
        model.init_weights(seed=1)
        layer = model.model.layers[0].mlp
        layer.up_proj.weight, layer.down_proj.weight = layer.up_proj.weight * scale, layer.down_proj.weight * scale
        model.apply(lambda x: x.astype(mx.bfloat16))
        write_json(tmp_path / "config.json", config_to_hf(lm.config))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
        lm.tokenizer.save(tmp_path)
        return tmp_path

    return save


def dtypes(path):
    return {x.dtype for x in load(path).weights}


def test_bfloat16_becomes_float16_where_it_is_emulated(save, simulated_gpu):
    emulated = simulated_gpu.device.name in ("Apple M1", "Apple M2 Max")
    assert device.emulates_bfloat16() == emulated
    assert dtypes(save()) == {mx.float16 if emulated else mx.bfloat16}


@pytest.mark.parametrize("scale", [3e2, 1e3, 1e6])
def test_not_if_activations_or_weights_are_large(save, simulated_gpu, scale):
    assert dtypes(save(scale)) == {mx.bfloat16}
