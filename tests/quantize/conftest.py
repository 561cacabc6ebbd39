"""Small models with something to quantize: correlated weights, a tokenizer, a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from tests.small_models import arrays_of, random_decoder, write_folder

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def write_model(tiny_tokenizer):
    """`write_model(folder, dtype, **changes)`: a Llama of 0.1M parameters, or another family by its fields."""

    def write(folder: Path, dtype: mx.Dtype = mx.float16, **changes) -> ModelConfig:
        config = ModelConfig(**{**LLAMA, **changes})
        model = arrays_of(random_decoder(config))
        values = {name: (4 * v if v.ndim == 2 else v).astype(dtype) for name, v in model.items()}
        write_folder(folder, values, config, torch_dtype=str(dtype).removeprefix("mlx.core."))
        tiny_tokenizer.save(folder)
        return config

    return write


@pytest.fixture(scope="session")
def model(write_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def texts(make_text, tmp_path_factory) -> tuple[Path, Path]:
    """One to calibrate with, one to measure on."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "calibration.txt").write_text(make_text(1200), encoding="utf-8")
    (folder / "evaluation.txt").write_text(make_text(2000)[-2000:], encoding="utf-8")
    return folder / "calibration.txt", folder / "evaluation.txt"


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """A plot takes half a second: only tests with the fixture `plots` draw one."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("mlxlm.quantize.pipeline.plot_quantization", lambda report, path: None)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("mlxlm.quantize.report.SECONDS", 0.0)
    monkeypatch.setattr("mlxlm.quantize.sensitivity.TOKENS", 256)
    monkeypatch.setattr("mlxlm.quantize.calibration_text.CALIBRATION_TOKENS", 2048)
    monkeypatch.setattr("mlxlm.quantize.calibration_text.EVAL_TOKENS", 512)


@pytest.fixture
def plots():
    """Enable plots."""


def needed_bytes(folder: Path) -> int:
    """Bytes of the files of a quantized model without the report."""
    files = (file for file in folder.iterdir() if file.stem not in ("quantization", "README"))
    return sum(file.stat().st_size for file in files)
