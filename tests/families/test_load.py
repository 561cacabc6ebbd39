"""Presets and config.json files."""

import json

import pytest

from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf, load_config, load_preset, preset_names
from mlxlm.utils.errors import ConfigError


def test_presets_span_the_range_and_are_named_by_their_size():
    counts = [load_preset(name).parameter_count() for name in preset_names()]
    assert counts == sorted(counts)
    assert counts[0] < 0.4e6 and counts[-1] > 1e9
    for name, count in zip(preset_names(), counts, strict=True):
        stated = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert stated / 1.2 < count < stated * 1.2


def test_every_preset_quantizes_in_every_layer():
    for name in preset_names():
        c = load_preset(name)
        assert c.hidden_size % 32 == 0 and c.intermediate_size % 32 == 0
        assert c.num_attention_heads * c.head_dim % 32 == 0


def test_unknown_preset_lists_the_presets():
    with pytest.raises(ConfigError, match="no preset '2m'.*0.3m, 1m"):
        load_preset("2m")


def test_round_trip_through_json(tmp_path):
    config = ModelConfig(64, 2, 4, 128, 100, num_key_value_heads=2, eos_token_id=[1, 2], rope_theta=1e6)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"hidden_size": 1e999}'])
def test_malformed_config_is_one_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="config.json"):
        load_config(tmp_path / "config.json")
