"""Loaded models: float16 on M1 and M2, and generation_config.json, whose defaults arguments override."""

import json
from dataclasses import replace

import pytest

import mlxlm
from mlxlm.backend import device
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.families import config_to_hf
from mlxlm.generation import GenerationConfig, GenerationOptions, load
from mlxlm.model import Decoder
from mlxlm.utils.errors import ConfigError, GenerationError
from mlxlm.utils.json_files import write_json


def write(folder, values):
    (folder / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))


def test_the_fields_that_it_sets(tmp_path):
    assert GenerationConfig.read(tmp_path) == GenerationConfig()
    sampling = {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    ignored = {"eos_token_id": [2], "max_new_tokens": 2048, "transformers_version": "4.51.0", "typical_p": "?"}
    write(tmp_path, {**sampling, **ignored, "do_sample": True, "top_k": None, "example_prompt": "Why is grass green?"})
    assert GenerationConfig.read(tmp_path) == GenerationConfig(sampling, "Why is grass green?")
    write(tmp_path, {**sampling, "do_sample": False})
    assert GenerationConfig.read(tmp_path).options == {"temperature": 0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0, it must be a number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": True}, "top_k is True"),
        ({"example_prompt": 3}, "example_prompt is 3"),
        ({"example_prompt": " "}, "example_prompt is ' '"),
        ({"example_prompt": "a\nb"}, "one line of at most 200 printable"),
        ({"example_prompt": "\x1b[2J"}, "printable"),
        ({"example_prompt": "a" * 201}, "at most 200"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_it(tmp_path, content, problem):
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=problem) as error:
        GenerationConfig.read(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(error.value)


def test_what_is_written_is_read_and_other_fields_stay(tmp_path):
    write(tmp_path, {"_from_model_config": True, "eos_token_id": 2, "top_k": 3})
    config = GenerationConfig({"temperature": 0.8}, "Once upon a time")
    config.write(tmp_path)
    values = json.loads((tmp_path / "generation_config.json").read_text())
    assert values == {
        "eos_token_id": 2, "top_k": 3, "temperature": 0.8, "do_sample": True, "example_prompt": "Once upon a time",
    }  # fmt: skip
    assert GenerationConfig.read(tmp_path) == replace(config, options={"temperature": 0.8, "top_k": 3})
    GenerationConfig({"temperature": 0.0}).write(tmp_path)  # an example stays
    assert GenerationConfig.read(tmp_path) == GenerationConfig({"temperature": 0.0}, "Once upon a time")
    with pytest.raises(GenerationError, match="example_prompt"):
        GenerationConfig(example_prompt="a\nb").write(tmp_path)


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    GenerationConfig({"temperature": 0.8, "top_k": 7}, "Once upon a time").write(tmp_path)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.temperature, theirs.top_k, theirs.do_sample) == (0.8, 7, True)


def test_generating_uses_its_defaults(lm, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(lm.config)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(lm.model.parameters())))
    lm.tokenizer.save(tmp_path)
    write(tmp_path, {"temperature": 5.0, "top_k": 2, "do_sample": True})
    theirs = load(tmp_path)
    assert theirs.generation_options(top_k=3) == GenerationOptions(temperature=5.0, top_k=3)

    def text(model, **options):
        return mlxlm.generate(model, "The quick", seed=1, max_tokens=20, **options).text

    assert text(theirs) == text(lm, temperature=5.0, top_k=2) != text(lm)
    assert text(theirs, temperature=0) == text(lm, temperature=0)
    (one,) = mlxlm.batch(theirs, ["The quick"], seed=1, max_tokens=20)
    assert one.text == mlxlm.batch(lm, ["The quick"], seed=1, max_tokens=20, temperature=5.0, top_k=2)[0].text


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
