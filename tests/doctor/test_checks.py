"""The checks of kernels, training and decoding pass here at tiny sizes, and find what is wrong."""

from dataclasses import replace

import pytest

from mlxlm.backend.cpu_extension import Extension
from mlxlm.backend.mlx import ON_CPU
from mlxlm.doctor import decoding_checks, kernel_checks, training_checks
from mlxlm.doctor.check import run_check
from mlxlm.doctor.decoding_checks import DecodingChecks, memory_checks
from mlxlm.doctor.kernel_checks import benchmark_checks
from mlxlm.doctor.sizes import CPU
from mlxlm.doctor.training_checks import TrainingChecks
from mlxlm.doctor.worker import full_suite
from mlxlm.kernels import bench, dispatch
from mlxlm.kernels.attention import DECODE
from mlxlm.kernels.dispatch import Choice
from mlxlm.train import Step
from tests.doctor.tiny import DTYPE, TINY


def run(checks):
    return {result.title: result for result in map(run_check, checks)}


def short_benchmarks():
    """The benchmarks that take less than a second."""
    return [check for check in benchmark_checks(TINY) if check.name != "training_attention"]


def only(results, status):
    return {title: result.reason for title, result in results.items() if result.status == status}


def test_all_checks_have_names_of_their_own(tmp_path):
    for sizes in (CPU, TINY):
        checks = full_suite(tmp_path, sizes)
        assert len({(check.section, check.name, check.case) for check in checks}) == len(checks)
    sections = list(dict.fromkeys(check.section for check in checks))
    assert sections == ["memory and matrix products", "decoding", "training", "kernels", "kernel benchmarks"]
    assert not list(tmp_path.iterdir())  # nothing runs before it is asked to


@pytest.mark.skipif(not ON_CPU, reason="of a CPU")
def test_kernels_on_a_cpu():
    results = run(kernel_checks.kernel_checks(TINY))
    assert only(results, "skipped") == {"Metal kernels": "no Metal on this machine"} and not only(results, "failed")
    errors = [r.values["error"] for r in results.values() if "error" in r.values]
    assert errors and max(errors) < 1e-5
    in_use = results["implementations in use"].values
    assert in_use["mlx"] == len(in_use["operations"]) > 10


def test_a_wrong_kernel_is_found(monkeypatch):
    blockwise = DECODE.paths["blockwise"]
    monkeypatch.setitem(DECODE.paths, "blockwise", lambda *args, **kwargs: 1.1 * blockwise(*args, **kwargs))
    failed = only(run(kernel_checks.kernel_checks(TINY)), "failed")
    assert failed and all("the relative error is 0.1, above" in reason for reason in failed.values())
    assert all(title.startswith("decode_attention, blockwise: ") for title in failed)


def test_a_kernel_that_does_not_compile_is_found(monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("error: expected ';'")

    monkeypatch.setitem(DECODE.paths, "blockwise", broken)
    failed = only(run(kernel_checks.kernel_checks(TINY)), "failed")
    assert failed and set(failed.values()) == {"RuntimeError: error: expected ';'"}
    failed = only(run(short_benchmarks()), "failed")
    assert failed and all(reason == "blockwise: failed: error: expected ';'" for reason in failed.values())


def test_a_disabled_metal_kernel_is_found(monkeypatch):
    why = "MLX's own; not metal: its Metal kernel is wrong on this machine (error 1.0e+00)"
    monkeypatch.setattr(kernel_checks, "choose_path", lambda operation, case: Choice("mlx", why))
    result = run(kernel_checks.kernel_checks(TINY))["implementations in use"]
    assert result.status == "failed" and why in result.reason


def test_benchmarks_change_nothing(new_machine, monkeypatch):
    from mlxlm.kernels import measurements

    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    monkeypatch.setattr(bench, "_MIN_SECONDS", 0)
    results = run(short_benchmarks())
    assert results and not only(results, "failed")
    assert all(result.values["mlx_ms"] > 0 and result.values["fastest"] for result in results.values())
    assert not measurements.cache_path().exists()


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setattr(training_checks, "_CORPUS_BYTES", 60_000)
    return TrainingChecks(TINY, tmp_path)


def test_training(training, monkeypatch):
    results = run(training)
    repeated, resumed = list(results.values())[1:]
    assert not only(results, "failed").keys() - {"the loss falls"}  # not in four steps
    assert repeated.values == {"steps": 4, "equal_losses": True, "equal_weights": True}
    assert resumed.values == {"stopped_after_step": 2, **repeated.values}


def test_training_that_is_not_equal_to_the_bit_is_found(training, monkeypatch):
    real = training_checks.train

    def train(run, *args, **options):
        for event in real(run, *args, **options):
            different = isinstance(event, Step) and event.step == 3 and run.path.name != "uninterrupted"
            yield replace(event, loss=event.loss + 1e-6) if different else event

    monkeypatch.setattr(training_checks, "train", train)
    results = run(training)
    for name in ("repeated: the same bits", "stopped and resumed: the same bits"):
        assert results[name].status == "failed" and "losses differ from step 3 on" in results[name].reason
        assert results[name].values["first_different_step"] == 3 and results[name].values["equal_weights"]


@pytest.mark.parametrize(
    "losses, digests, reason",
    [
        ([2.0, 1.0], {"weights": "b"}, "the losses are equal, the weights or the state of the optimizer are not"),
        ([2.0], {"weights": "a"}, "it has 1 steps instead of 2"),
    ],
)
def test_other_differences_of_runs_are_found(losses, digests, reason):
    expected = training_checks._Trained([2.0, 1.0], {"weights": "a"}, {})
    with pytest.raises(training_checks.CheckFailed, match=reason):
        training_checks._compare(training_checks._Trained(losses, digests, {}), expected)


@pytest.mark.parametrize(
    "losses, reason", [([5.7, 5.6], "is 5.60 after 2 steps"), ([9.0, 1.0], "expected is about 5.70")]
)
def test_a_loss_that_does_not_fall_is_found(training, losses, reason):
    training._uninterrupted = training_checks._Trained(losses, {}, {})
    assert reason in run(training)["the loss falls"].reason


@pytest.mark.skipif(not ON_CPU, reason="test_full.py runs them, too, which is slow on a simulated GPU")
def test_decoding_and_memory():
    results = run([*memory_checks(TINY), *DecodingChecks(TINY)])
    assert not only(results, "failed")
    speed = results[f"speed, {DTYPE} weights"].values
    assert speed["tokens"] == 4 and speed["tokens_per_second"] > 0 and speed["share_of_bandwidth"] > 0
    assert results["answers of the bundled model"].values["questions"] == 10
    launches = results["kernel launches"].values
    assert 0 < launches["microseconds_per_launch"] < launches["microseconds_of_one"] * launches["launches"]
    assert not only(results, "skipped") and results["speed, 4-bit weights"].values["tokens_per_second"] > 0


@pytest.mark.skipif(not ON_CPU, reason="of a CPU")
def test_quantized_weights_that_a_cpu_dequantizes(monkeypatch):
    monkeypatch.setattr(decoding_checks, "load_extension", lambda: Extension(None, "there is no g++"))
    results = run(list(DecodingChecks(TINY)))
    reason = "quantized weights are dequantized: there is no g++"
    assert only(results, "skipped") == {"speed, 4-bit weights": reason}


def test_a_wrong_cache_is_found(monkeypatch):
    real = decoding_checks.DecodeStep.__call__

    def forgetful(step, tokens, caches):
        if caches[0].offset == TINY.prompt - 8:  # the first decoded token
            for cache in caches:
                cache.trim(2)
        return real(step, tokens, caches)

    monkeypatch.setattr(decoding_checks.DecodeStep, "__call__", forgetful)
    failed = only(run(check for check in DecodingChecks(TINY) if "against none" in check.name), "failed")
    assert "the relative error of the logits" in failed["key-value cache against none"]


def test_wrong_answers_are_found(monkeypatch):
    from mlxlm.data.small_world import corpus
    from mlxlm.evaluate import small_world

    monkeypatch.setattr(small_world, "is_right", lambda turn, answer: corpus.is_right(turn, answer[:-3]))
    failed = only(run(list(DecodingChecks(TINY))[:1]), "failed")
    assert "of 10 answers are right, at least 75% are expected" in failed["answers of the bundled model"]
