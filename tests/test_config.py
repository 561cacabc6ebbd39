import json

import pytest

from mlxlm.config import ModelConfig, preset_names
from mlxlm.errors import ConfigError

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_presets_span_the_range_and_are_named_by_their_size():
    counts = [ModelConfig.preset(name).parameter_count() for name in preset_names()]
    assert counts == sorted(counts)
    assert counts[0] < 0.4e6 and counts[-1] > 1e9
    for name, count in zip(preset_names(), counts, strict=True):
        stated = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert stated / 1.2 < count < stated * 1.2


def test_every_preset_quantizes_without_a_layer_left_out():
    for name in preset_names():
        c = ModelConfig.preset(name)
        assert c.hidden_size % 32 == 0 and c.intermediate_size % 32 == 0
        assert c.num_attention_heads * c.head_dim % 32 == 0


def test_unknown_preset_names_those_there_are():
    with pytest.raises(ConfigError, match="no preset '2m'.*0.3m, 1m"):
        ModelConfig.preset("2m")


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**SIZES, "num_attention_heads": 6, "vocab_size": 0}, num_key_value_heads=4, rope_theta=-1)
    message = str(caught.value)
    assert "vocab_size is 0" in message and "rope_theta is -1" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "does not divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 2**40}, "hidden_size is"),
        ({"hidden_size": 2**30, "num_hidden_layers": 2**20}, "parameters"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'.*silu, gelu"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits is 7"),
        ({"quantization": 4}, "quantization is 4"),
    ],
)
def test_impossible_sizes(change, expected):
    with pytest.raises(ConfigError, match=expected):
        ModelConfig(**{**SIZES, **change})


def test_from_dict_names_the_file_and_what_is_missing():
    with pytest.raises(ConfigError, match="x.json: missing num_hidden_layers, vocab_size"):
        ModelConfig.from_dict(
            {k: v for k, v in SIZES.items() if k not in ("num_hidden_layers", "vocab_size")}, "x.json"
        )


def test_rope_theta_of_old_and_new_transformers():
    assert ModelConfig.from_dict({**SIZES, "rope_theta": 5e5}).rope_theta == 5e5
    new = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert ModelConfig.from_dict(new).rope_theta == 5e5
    with pytest.raises(ConfigError, match="x.json: this decoder has no rope_type 'spiral'"):
        ModelConfig.from_dict({**SIZES, "rope_scaling": {"rope_type": "spiral", "factor": 4}}, "x.json")


def test_round_trip_through_json(tmp_path):
    config = ModelConfig(**SIZES, num_key_value_heads=2, eos_token_id=[1, 2], rope_theta=1e6)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert ModelConfig.load(tmp_path) == config


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"hidden_size": 1e999}'])
def test_malformed_config_is_one_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="config.json"):
        ModelConfig.load(tmp_path / "config.json")


def test_flops_and_cache_bytes():
    c = ModelConfig(**SIZES, num_key_value_heads=2)
    matmul = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 100
    assert c.matmul_parameters() == matmul
    assert c.flops_per_token(10) == 2 * matmul + 2 * (4 * 64 * 10)
    assert c.flops_per_token(10, training=True) == 3 * c.flops_per_token(10)
    assert c.kv_bytes_per_token(2) == 2 * 2 * (2 * 16) * 2
