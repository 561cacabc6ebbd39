"""Cross-checks with other programs: their answers are given, or computed by a small process, or by the real program."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from dataclasses import replace

import pytest

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert import convert, cross_check
from mlxlm.convert.verify import verify
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import write_json
from tests.small_models import arrays_of, in_memory, random_decoder, write_folder

START, COUNT = 4, 12


@pytest.fixture
def model(tiny_config):
    return random_decoder(tiny_config)


@pytest.fixture
def memory(model):
    """A checkpoint that is not in files."""
    return in_memory(model)


@pytest.fixture
def folder(model, tmp_path, tiny_tokenizer):
    """The same in Hugging Face's layout, with weights large enough that its tokens are no ties."""
    weights = {n: 4 * w if w.ndim > 1 else w for n, w in arrays_of(model).items()}
    path = write_folder(tmp_path / "source", weights, model.config)
    tiny_tokenizer.save(path)
    return path


def greedy_tokens(checkpoint: Checkpoint) -> list[int]:
    ids = [5, 17, 280, 33]
    return [*ids, *cross_check.greedy_tokens(checkpoint, ids, COUNT)]


def answering(monkeypatch, answer) -> None:
    """Replace the other programs by `answer(backend, path, ids, start)`."""
    monkeypatch.setattr(cross_check, "run_backend", answer)


def predictions(ids, start, other=0, gap=0.0) -> cross_check.BackendOutput:
    """The text's own tokens, but for the first, which is another one by `other`."""
    own = list(ids[start:])
    return cross_check.BackendOutput([own[0] + other, *own[1:]], [gap, *[0.0] * (len(own) - 1)], logit_std=1.0)


def test_ties_are_equal_and_missing_programs_are_skipped(memory, monkeypatch):
    def answer(backend, path, ids, start):
        if backend == "transformers":
            raise cross_check.BackendUnavailable("not installed")
        return predictions(ids, start, *((1, 0.01) if backend == "llama.cpp" else ()))

    answering(monkeypatch, answer)
    checks = {check.name: check for check in verify(memory, memory, "out", ("mlx_lm", "llama.cpp", "transformers"))}
    assert checks["mlx_lm"].result == "equal" and "all equal" in checks["mlx_lm"].detail
    assert checks["llama.cpp"].result == "within rounding" and "ties of two tokens: 1" in checks["llama.cpp"].detail
    assert checks["transformers"].result == "skipped" and checks["transformers"].detail == "not installed"


@pytest.mark.parametrize(("other", "gap"), [(1, 0.01), (0, float("nan"))])
def test_another_token_is_an_error(memory, monkeypatch, other, gap):
    answering(monkeypatch, lambda backend, path, ids, start: predictions(ids, start, other, gap))
    with pytest.raises(CheckpointError, match=r"out: mlx_lm predicts token .*greedy token 1 of 8.*without .cross"):
        verify(memory, memory, "out", ("mlx_lm",))


def test_a_difference_that_is_not_ours_is_a_warning(memory, tmp_path, monkeypatch):
    def only_mlx_lm(backend, path, ids, start):
        return predictions(ids, start, *((1, 1.0) if backend == "mlx_lm" else ()))

    answering(monkeypatch, only_mlx_lm)
    found = {check.name: check for check in verify(memory, memory, "out", ("transformers", "mlx_lm"))}
    assert found["mlx_lm"].result == "differs" and found["mlx_lm"].detail.endswith("transformers agrees with mlxlm")
    (tmp_path / "config.json").touch()
    source = replace(memory, path=tmp_path)
    [*_, check] = verify(source, memory, "out", ("mlx_lm",))
    assert check.result == "differs" and check.detail.endswith("the same happens with the source")

    def only_of_the_output(backend, path, ids, start):
        return predictions(ids, start, *(() if path == tmp_path else (1, 1.0)))

    answering(monkeypatch, only_of_the_output)
    with pytest.raises(CheckpointError, match="mlx_lm predicts"):
        verify(source, memory, "out", ("mlx_lm",))


def test_a_rejected_output_is_a_warning_with_its_final_name(folder, tmp_path, monkeypatch):
    def answer(backend, path, ids, start):
        if backend == "mlx_lm":
            raise cross_check.BackendRejected(
                f"mlx_lm can't read it: ValueError: The model at {path.name} in {path} is odd"
            )
        return predictions(ids, start)

    answering(monkeypatch, answer)
    report = convert(folder, tmp_path / "out", cross_check=True)
    [warning] = report.warnings
    assert warning.startswith("mlx_lm can't run this output: ") and "transformers agrees" in warning
    assert f"The model at {tmp_path / 'out'} in {tmp_path / 'out'} is odd" in warning
    assert ".partial" not in json.dumps(report.to_dict())
    assert {check.name: check.result for check in report.checks}["mlx_lm"] == "refused"
    (folder / "config.json").rename(tmp_path / "config.json")
    source = replace(open_checkpoint(tmp_path / "out"), path=tmp_path / "nowhere")
    with pytest.raises(cross_check.BackendRejected, match=r"out: mlx_lm can't read it.*try: without .cross_check"):
        verify(source, open_checkpoint(tmp_path / "out"), "out", ("mlx_lm",))


def test_other_tokens_of_a_text_are_an_error_unless_the_writer_warns(folder, monkeypatch):
    source = open_checkpoint(folder)
    answering(monkeypatch, lambda backend, path, ids, start: replace(predictions(ids, start), text_ids=[1, 2, 3]))
    ids = greedy_tokens(source)
    with pytest.raises(CheckpointError, match="llama.cpp tokenizes a text differently"):
        cross_check.cross_check_one("llama.cpp", source, source, "out", ids, START)
    check = cross_check.cross_check_one("llama.cpp", source, source, "out", ids, START, tokens_may_differ=True)
    assert check.result == "equal" and "see the warnings" in check.detail


def stand_in(monkeypatch, program: str) -> None:
    """A process that needs no time to start stands for the other program: `program` reads `request`."""
    monkeypatch.setattr(cross_check, "REQUIRED_PACKAGES", dict.fromkeys(cross_check.REQUIRED_PACKAGES, ()))
    monkeypatch.setattr(cross_check, "_CHILD", f"import json, sys; request = json.load(sys.stdin); {program}")


def test_process(tmp_path, monkeypatch):
    stand_in(
        monkeypatch,
        "print('loading'); print(json.dumps({'tokens': request['ids'][request['start']:], 'logit_gaps': [0.0],"
        " 'logit_std': 1.0, 'text_ids': [4]}))",
    )
    found = cross_check.run_backend("llama.cpp", tmp_path, [1, 2, 3], 2)
    assert found == cross_check.BackendOutput([3], [0.0], 1.0, text_ids=[4])


@pytest.mark.parametrize(
    ("backend", "stderr", "kind", "reason"),
    [
        ("mlx_lm", "ValueError: Model type mamba9 not supported.", cross_check.BackendUnavailable, "mamba9 not"),
        ("mlx_lm", "Traceback\nValueError: Missing 3 parameters", cross_check.BackendRejected, "read it: .*Missing 3"),
        ("mlx_lm", "", cross_check.BackendRejected, "exit code 1"),
        (
            "llama.cpp",
            "load: info\nllama_model_load: error loading model: unordered_map::at\nTraceback\nValueError: Failed",
            cross_check.BackendRejected, "error loading model: unordered_map::at",
        ),
        (
            "llama.cpp", "llama_model_load: error loading model: unknown model architecture: 'x'\nValueError: Failed",
            cross_check.BackendUnavailable, "unknown model architecture",
        ),
    ],
)  # fmt: skip
def test_reasons_of_failed_processes(tmp_path, monkeypatch, backend, stderr, kind, reason):
    stand_in(monkeypatch, f"print({stderr!r}, file=sys.stderr); sys.exit(1)")
    with pytest.raises(kind, match=reason) as caught:
        cross_check.run_backend(backend, tmp_path, [1, 2], 1)
    assert caught.type is kind


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(cross_check.REQUIRED_PACKAGES, "mlx_lm", ("no_such_module",))
    with pytest.raises(cross_check.BackendUnavailable, match="no_such_module not installed"):
        cross_check.run_backend("mlx_lm", tmp_path, [1, 2], 1)


@pytest.fixture
def in_process(monkeypatch):
    """Run other programs in this process, which has imported them already."""

    def run(command, *, input, **_):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(input))
            cross_check.main()
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr(cross_check.subprocess, "run", run)


def test_the_process_reads_its_request(tmp_path, monkeypatch):
    monkeypatch.setitem(cross_check.REQUIRED_PACKAGES, "another", ())
    with pytest.raises(cross_check.BackendRejected, match="KeyError: 'another'"):
        cross_check.run_backend("another", tmp_path, [1, 2], 1)


def test_transformers_agrees_and_names_the_first_layer_that_differs(folder, in_process):
    pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    pytest.importorskip("transformers")
    source = open_checkpoint(folder)
    ids = greedy_tokens(source)
    values = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name]["rope_theta"] = 50.0
    write_json(folder / "config.json", {**values, "rope_theta": 50.0})  # after the source was opened
    with pytest.raises(
        CheckpointError, match="transformers predicts .* the first layer that differs is model.layers.0"
    ):
        cross_check.cross_check_one("transformers", source, source, "out", ids, START)


def test_mlx_lm_agrees_with_the_right_tokens_only(folder, in_process):
    pytest.importorskip("mlx_lm")
    source = open_checkpoint(folder)
    ids = greedy_tokens(source)
    assert cross_check.cross_check_one("mlx_lm", source, source, "out", ids, START).result == "equal"


def test_llama_cpp_verifies_a_file_by_any_name(folder, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    report = convert(folder, tmp_path / "my-Phi3-like.gguf", cross_check=True)  # a name that llama.cpp would act on
    [check] = [check for check in report.checks if check.name == "llama.cpp"]
    assert check.result == "equal" and check.detail.endswith("; a text has equal tokens")
    assert report.warnings == []


def test_what_llama_cpp_says_of_a_broken_file(folder, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    convert(folder, tmp_path / "m.gguf", verify_output=False)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.0.attn_q", b"blk.0.attn_x"))
    with pytest.raises(
        cross_check.BackendRejected, match=r"out: llama.cpp can't read it: .*error loading model.*attn_q"
    ):
        cross_check.cross_check_one("llama.cpp", checkpoint, checkpoint, "out", [1, 2, 3, 4, 5, 6], START)
