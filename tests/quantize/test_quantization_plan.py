"""Which matrix gets what: sizes that don't divide, matrices that are stored together, recipes."""

import json

import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import RECIPES, Format
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.quantize.quantization_plan import decoder_matrices, recipe, uniform
from mlxlm.utils.errors import ConfigError


def described(config: ModelConfig) -> dict[str, LazyTensor]:
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(Decoder(config).parameters())}
    return {name: LazyTensor(shape, mx.float16, "F16", 0, lambda: None) for name, shape in shapes.items()}


def config_of(**changes) -> ModelConfig:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 300,
    }  # fmt: skip
    return ModelConfig(**{**sizes, **changes})


@pytest.mark.parametrize("mode, bits, group_size", [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_default_sizes_of_modes(mode, bits, group_size):
    assert Format.of(mode) == Format(bits, group_size, mode)
    with pytest.raises(ConfigError, match=f"{mode}"):
        Format.of(mode, bits=5)


@pytest.mark.parametrize("wrong", [{"bits": 7}, {"bits": 4, "group_size": 48}, {"bits": 4, "mode": "int8"}])
def test_invalid_formats(wrong):
    with pytest.raises(ConfigError, match="not a"):
        Format(**wrong)


@pytest.mark.parametrize("chosen", [Format(b, g) for b in (2, 3, 5, 8) for g in (32, 64, 128)] + [Format.of("nvfp4")])
def test_nbytes_equals_mlx(chosen):
    parts = mx.quantize(
        mx.zeros((3, 256), dtype=mx.float16), group_size=chosen.group_size, bits=chosen.bits, mode=chosen.mode
    )
    assert chosen.nbytes(3, 256) == sum(part.nbytes for part in parts)


def test_indivisible_rows():
    config = config_of(hidden_size=96, intermediate_size=100)
    plan = uniform(decoder_matrices(config, described(config)), Format(4, 64))
    assert plan.reduced_group_sizes["model.embed_tokens"] == 32
    assert plan.skipped == {f"model.layers.{i}.mlp.down_proj": 100 for i in range(2)}
    quantization_config = plan.quantization_config()
    assert quantization_config["model.layers.0.mlp.down_proj"] is False
    assert quantization_config["lm_head"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config.with_changes(quantization=quantization_config).quantization == quantization_config


def test_fused_matrices_have_one_format():
    config = config_of(model_type="phi3")
    plan = recipe(decoder_matrices(config, described(config)), "mixed_2_6")
    by_name = {matrix.name: matrix for matrix in plan.matrices}
    fused = by_name["model.layers.1.self_attn.qkv_proj"]
    assert len(fused.modules) == 3 and fused.rows == 3 * 64
    assert plan.format_of(fused).bits == 2  # mlx_lm's predicate looks for v_proj and finds none
    assert plan.format_of(by_name["model.layers.1.mlp.down_proj"]).bits == 6
    changed = plan.with_formats({fused.name: Format(5)})
    assert {changed.formats[module].bits for module in fused.modules} == {5}
    stored = config_to_hf(config.with_changes(quantization=changed.quantization_config()))["quantization"]
    assert stored["model.layers.1.self_attn.qkv_proj"]["bits"] == 5


class Named:
    """A model of which mlx_lm's predicate sees nothing but names and the number of layers."""

    def __init__(self, plan, layers):
        self._names, self.layers = [m.name for m in plan.matrices], [None] * layers

    def named_modules(self):
        return [(name, None) for name in self._names]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layers", [1, 4, 16, 22])
def test_recipes_equal_mlx_lm(name, layers):
    convert = pytest.importorskip("mlx_lm.convert")
    config = config_of(num_hidden_layers=layers)
    plan = recipe(decoder_matrices(config, described(config)), name, 32)
    theirs = convert.mixed_quant_predicate_builder(name, Named(plan, layers), 32)
    for matrix in plan.matrices:
        assert plan.format_of(matrix).to_dict() == theirs(matrix.name, None), matrix.name


def test_most_frequent_format_is_the_default():
    config = config_of()
    plan = uniform(decoder_matrices(config, described(config)), Format(2))
    other = plan.with_formats({m.name: Format(8) for m in plan.matrices if m.name != "lm_head"})
    assert other.default == Format(8) and list(other.quantization_config()) == ["group_size", "bits", "mode", "lm_head"]
    assert json.dumps(other.to_dict())
