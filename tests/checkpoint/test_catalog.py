"""The catalog of models, and names that stand for models."""

import json
import re
import subprocess
import sys

import pytest

from mlxlm.checkpoint import download, hub
from mlxlm.checkpoint.catalog import (
    HubSource,
    PyPISource,
    bundled_models,
    catalog,
    closest_names,
    default_entry,
    model_names,
)
from mlxlm.families import config_from_hf
from mlxlm.generation import GenerationConfig
from mlxlm.plan import find_config
from mlxlm.plan.inference import Serving, quantized_bits, weight_bytes
from mlxlm.utils.errors import CheckpointError
from tests.paths import ROOT


@pytest.mark.parametrize("entry", catalog().values(), ids=catalog())
def test_an_entry_is_consistent(entry):
    assert re.fullmatch(r"[a-z0-9.-]+", entry.name) and not hub.is_id(entry.name)
    assert entry.description.endswith(".") and len(entry.description) < 100
    assert entry.restrictions or entry.license in ("apache-2.0", "mit")
    assert entry.sources and (entry.file is None) == (entry.sha256 is None)
    for source in entry.sources:
        assert isinstance(source, PyPISource) or hub.is_id(source.repository)
    config = config_from_hf(entry.config)
    assert (entry.parameters, entry.context_length) == (config.parameter_count(), config.max_position_embeddings)
    GenerationConfig.parse(entry.generation_config, entry.name)
    assert not entry.generation_config or entry.file
    bits = quantized_bits(config)
    if entry.sha256 is None:  # a folder: weights, perhaps with the head apart from the embeddings, and a tokenizer
        weights = weight_bytes(config, Serving(bits=bits or 16))
        head = config.vocab_size * config.hidden_size * (bits or 16) // 7
        assert weights < entry.bytes < weights + head + 50e6


def test_the_file_has_nothing_that_is_not_read():
    values = json.loads((ROOT / "models" / "catalog.json").read_text(encoding="utf-8"))
    assert values.keys() == {"default", "models"} and len(values["models"]) == len(catalog())


def test_the_default_is_small_tested_and_free():
    entry = default_entry()
    assert entry.tested and entry.bytes < 100e6 and entry.license == "apache-2.0" and entry.restrictions is None
    assert [type(source) for source in entry.sources] == [HubSource, PyPISource]
    assert {
        source.file if isinstance(source, HubSource) else source.member.split("/")[1] for source in entry.sources
    } == {entry.file}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("SmolLM2-135M", ["smollm2-135m"]),
        ("qwen3-0.5b", ["qwen3-0.6b"]),
        ("llama3.2", ["llama3.2-1b", "llama3.2-3b"]),
        ("llama3.2:1b", ["llama3.2-1b"]),
        ("gemma3:latest", ["gemma3-1b", "gemma3-4b"]),
        ("something else", []),
    ],
)
def test_closest_names(text, names):
    assert closest_names(text) == names


def test_a_name_of_ollama_needs_its_prefix(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "find_ollama", lambda name: tmp_path if name == "llama3.2" else None)
    with pytest.raises(CheckpointError, match=r"\(try: ollama:llama3.2 or llama3.2-1b or llama3.2-3b\)"):
        download.resolve("llama3.2")


def test_planning_downloads_nothing():
    assert find_config("qwen3-0.6b").parameter_count() == 596_049_920


def test_a_folder_has_priority_over_a_name(model_dir, monkeypatch, tmp_path):
    model_dir.rename(tmp_path / "qwen3-0.6b")
    monkeypatch.chdir(tmp_path)
    assert str(download.resolve("qwen3-0.6b")) == "qwen3-0.6b"
    assert find_config("qwen3-0.6b").vocab_size == 300


def test_a_folder_of_the_package_is_a_model(model_dir, monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    model_dir.rename(tmp_path / "models" / "small-world")
    monkeypatch.setattr("mlxlm.checkpoint.catalog.resource", lambda name: tmp_path / name)
    assert list(bundled_models()) == ["small-world"] and model_names()[0] == "small-world"
    assert download.resolve("small-world") == tmp_path / "models" / "small-world"
    assert find_config("small-world").vocab_size == 300


@pytest.mark.parametrize("variable", ["MLXLM_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline(monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="qwen3-4b isn't on this machine, and downloads are forbidden"):
        download.resolve("qwen3-4b")


@pytest.mark.parametrize("name", ["smolm2-135m", "smollm2_135m"])
def test_misspelled_name(name):
    with pytest.raises(CheckpointError, match=rf"there is no model '{name}' \(try: smollm2-135m\)"):
        download.resolve(name)


def test_looking_up_names_does_not_import_mlx():
    code = (
        "import sys; from mlxlm.checkpoint.catalog import model_names; model_names(); print('mlx.core' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "False\n"
