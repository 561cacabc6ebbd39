"""Models of the Hugging Face hub."""

import shutil

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import hub, load_model, open_checkpoint
from mlxlm.utils.errors import CheckpointError

SHA = "0123456789abcdef0123456789abcdef01234567"


def test_is_id():
    good = ["owner/name", "o/n@main", "mlx-community/Qwen3-0.6B-4bit", "a/b@refs/pr/3"]
    bad = ["name", "/owner/name", "./a/b", "../a/b", "a/b/c", "a/b@", "", "a//b", "~/x", "a/../b", "a b/c", "a/.."]
    assert all(hub.is_id(id) for id in good) and not any(hub.is_id(id) for id in bad)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner/name/tree/main?library=mlx#files", "owner/name"),
        ("http://www.huggingface.co/owner/name/", "owner/name"),
        ("hf.co/owner/na.me-1/tree/refs%2Fpr%2F3", "owner/na.me-1@refs/pr/3"),
        ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("https://huggingface.co/owner/name/blob/main/a/name-q8_0.gguf", "owner/name:Q8_0"),
        ("https://example.com/owner/name", "https://example.com/owner/name"),
        ("huggingface.co/owner", "huggingface.co/owner"),
        ("owner/name@main", "owner/name@main"),
    ],
)
def test_addresses(text, id):
    assert hub.without_address(text) == id


def test_the_address_of_a_file():
    with pytest.raises(
        CheckpointError, match=r"one file of a model \(try: o/n; for a .gguf file, hf download o/n x/y.gguf,"
    ):
        open_checkpoint("https://huggingface.co/o/n/blob/main/x/y.gguf?download=true")


@pytest.fixture
def cached(model_dir, tmp_path, monkeypatch):
    """The model in a cache as the hub's own tools leave it, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot = repository / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    for file in model_dir.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_model_in_the_cache(cached, model_dir):
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.path == cached
    tokens = mx.array([[1, 2]])
    np.testing.assert_array_equal(load_model("owner/name@main")[0](tokens), load_model(model_dir)[0](tokens))
    with pytest.raises(CheckpointError, match="neither a path nor in the cache.*downloads allowed"):
        open_checkpoint("owner/other")
    (cached / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="owner/name has no safetensors, no PyTorch weights"):
        open_checkpoint("owner/name")


def test_without_a_network_the_cache_is_used_at_once(cached, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    assert hub.download("owner/name") == cached


def test_existing_path_has_priority(cached, tmp_path, model_dir):
    shutil.copytree(model_dir, tmp_path / "owner" / "name")
    assert str(open_checkpoint("owner/name").path) == "owner/name"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GatedRepoError", "owner/name@v2 is gated"),
        ("RepositoryNotFoundError", "there is no path owner/name@v2"),
        ("RevisionNotFoundError", "owner/name has no revision v2"),
        ("LocalEntryNotFoundError", "the hub can't be reached"),
        ("OfflineModeIsEnabled", "the hub can't be reached"),
        (None, "can't be downloaded: No space left on device"),
    ],
)
def test_hub_errors(monkeypatch, kind, expected):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def refuse(repository, **options):
        calls.append((repository, options["revision"]))
        if kind is None:
            raise OSError("No space\nleft on device")
        kind_of_error = getattr(huggingface_hub.errors, kind)
        raise kind_of_error.__new__(kind_of_error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_checkpoint("owner/name@v2")
    assert calls == [("owner/name", "v2")] and "\n" not in str(caught.value)


def test_pytorch_files_are_the_fallback(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def download(repository, revision, allow_patterns, local_files_only):
        calls.append(allow_patterns)
        if "pytorch_model*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    assert hub.download("owner/name") == tmp_path
    assert "model*.safetensors" in calls[0] and "*.safetensors" not in calls[0]  # nor consolidated.safetensors
    assert not any("bin" in pattern for pattern in calls[0]) and len(calls) == 2
