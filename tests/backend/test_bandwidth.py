"""Bytes per token, counted by hand; the best measurement is saved."""

import json

import pytest

from mlxlm.backend import bandwidth
from mlxlm.backend.mlx import nn, tree_flatten
from mlxlm.model import Decoder


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def all_bytes(model):
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def test_only_a_tied_embedding_is_read_whole(tiny_config):
    tied = Decoder(tiny_config)
    assert bandwidth.weight_bytes(tied) == all_bytes(tied)
    untied = Decoder(tiny_config.with_changes(tie_word_embeddings=False))
    assert bandwidth.weight_bytes(untied) == all_bytes(untied) - untied.model.embed_tokens.weight.nbytes


def test_quantized_weights_count_as_in_memory(tiny_config):
    model = Decoder(tiny_config.with_changes(tie_word_embeddings=False))
    before = bandwidth.weight_bytes(model)
    nn.quantize(model, group_size=32, bits=8)
    assert before / 3.6 < bandwidth.weight_bytes(model) < before / 3  # 8 bits, a scale and a bias for 32 weights, norms
    table = model.model.embed_tokens
    assert all_bytes(model) - bandwidth.weight_bytes(model) == all_bytes(table)


def test_a_mixture_of_experts_has_no_number():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = [nn.Linear(4, 4)]

    assert bandwidth.weight_bytes(Mixture()) is None


def test_the_best_measurement_is_saved(cache_folder, monkeypatch):
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 1 << 22)
    assert bandwidth.cached_bandwidth() is None
    measured = bandwidth.measure_bandwidth()
    assert 1e8 < measured < 1e13
    assert bandwidth.cached_bandwidth() == measured
    monkeypatch.setattr(bandwidth, "_seconds", lambda work: 1000.0)  # a busy machine
    assert bandwidth.measure_bandwidth() == measured
    monkeypatch.setattr(bandwidth, "_seconds", lambda work: 1e-6)
    assert bandwidth.measure_bandwidth() == bandwidth.cached_bandwidth() > measured


def test_a_figure_of_a_busy_machine_is_corrected_by_faster_decoding(cache_folder, monkeypatch):
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 1 << 22)
    monkeypatch.setattr(bandwidth, "_seconds", lambda work: 1.0)  # busy
    busy = bandwidth.measure_bandwidth()
    small, large = (bandwidth.BytesPerToken(size, 0) for size in (10**7, 10**9))
    assert bandwidth.bandwidth_for(small, 1e6) == bandwidth.bandwidth_for(large, 0.9 * busy / 1e9) == busy
    assert bandwidth.bandwidth_for(large, 2 * busy / 1e9) == bandwidth.cached_bandwidth() == 2 * busy
    monkeypatch.setattr(bandwidth, "_seconds", lambda work: 0.1)
    assert bandwidth.bandwidth_for(large, 3 * busy / 1e9) == bandwidth.cached_bandwidth() == 10 * busy


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', "{" * 10_000, json.dumps({"x": 5.0})])
def test_an_invalid_file_is_replaced(cache_folder, monkeypatch, content):
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 1 << 22)
    path = cache_folder / "mlxlm" / "bandwidth.json"
    path.parent.mkdir()
    path.write_text(content)
    assert bandwidth.cached_bandwidth() is None
    assert bandwidth.measure_bandwidth() == bandwidth.cached_bandwidth()


def test_a_file_that_cant_be_written_is_no_error(cache_folder, monkeypatch):
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 1 << 22)
    (cache_folder / "mlxlm").write_text("a file in the way")
    assert bandwidth.measure_bandwidth() > 0
    assert bandwidth.cached_bandwidth() is None
