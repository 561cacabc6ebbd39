"""What the list of models and the catalog tell the chat page."""

from __future__ import annotations

import shutil

from starlette.testclient import TestClient

from mlxlm.checkpoint.local_models import folder_models
from mlxlm.generation import GenerationConfig
from mlxlm.server import model_library
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings


def get(models, path):
    return TestClient(make_app(models)).get(path).json()["data"]


def test_example_prompts_and_the_catalog(model_folder, tmp_path, monkeypatch):
    shutil.copytree(model_folder, tmp_path / "tiny")
    GenerationConfig(example_prompt="Count to 3.").write(tmp_path / "tiny")
    monkeypatch.setattr(model_library, "all_models", lambda folders: list(folder_models(*folders)))  # no others
    everything = Models({}, ModelSettings(models_dirs=(tmp_path,)))
    assert [model["example_prompt"] for model in get(everything, "/v1/models")] == ["Count to 3."]
    entries = {entry["id"]: entry for entry in get(everything, "/v1/catalog")}
    assert entries["smollm2-135m"]["size"] == 98362432 and "simple questions" in entries["smollm2-135m"]["description"]
    (tmp_path / "tiny").rename(tmp_path / "smollm2-135m")
    assert "smollm2-135m" not in {entry["id"] for entry in get(everything, "/v1/catalog")}  # is here
    given = Models({"tiny": str(tmp_path / "smollm2-135m")}, ModelSettings())
    assert get(given, "/v1/catalog") == []  # downloads nothing
