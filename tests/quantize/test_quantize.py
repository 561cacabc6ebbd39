"""Whole models: what is written, what mlx_lm makes of it, what it costs, and what is refused."""

import json

import numpy as np
import pytest

import mlxlm
from mlxlm._mlx import mx
from mlxlm.checkpoint import load_weights, save_weights
from mlxlm.checkpoint.source import open_checkpoint
from mlxlm.errors import CheckpointError, ConfigError, DataError
from mlxlm.quantize import REPORT, quantize, search
from mlxlm.quantize.plan import Format, uniform


def weights_bytes(folder) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def needed_bytes(folder) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if not file.name.startswith("quantization"))


@pytest.mark.parametrize(
    "settings",
    [{"bits": 4}, {"bits": 3, "group_size": 32}, {"mode": "mxfp4"}, {"mode": "nvfp4"}, {"recipe": "mixed_3_6"}],
    ids=str,
)
def test_rounding_is_to_the_bit_what_mlx_lm_writes(model, tmp_path, settings):
    convert = pytest.importorskip("mlx_lm.convert").convert
    quantize(model, tmp_path / "ours", **settings, measure=False)
    theirs = {"q_bits": settings.get("bits"), "q_group_size": settings.get("group_size")}
    if "recipe" in settings:
        theirs = {"quant_predicate": settings["recipe"], "q_group_size": 64}
    convert(str(model), str(tmp_path / "theirs"), quantize=True, q_mode=settings.get("mode", "affine"), **theirs)
    ours, reference = (load_weights(tmp_path / name) for name in ("ours", "theirs"))
    assert set(ours) == set(reference)
    for name, value in reference.items():
        assert ours[name].dtype == value.dtype and mx.array_equal(ours[name], value), name


@pytest.mark.parametrize(
    "settings", [{"method": "gptq", "bits": 3}, {"method": "awq"}, {"recipe": "mixed_2_6", "method": "gptq"}], ids=str
)
def test_calibrated_models_are_read_by_mlx_lm(model, tmp_path, texts, settings):
    mlx_lm = pytest.importorskip("mlx_lm")
    report = quantize(model, tmp_path / "out", **settings, calibration=texts[0], evaluation=texts[1])
    theirs, _ = mlx_lm.load(str(tmp_path / "out"))
    theirs.set_dtype(mx.float32)
    tokens = mx.array([[5, 60, 7, 200, 9, 11]])
    ours = mlxlm.load(tmp_path / "out").model(tokens)
    assert mx.abs(theirs(tokens) - ours).max().item() < 1e-3
    assert report.calibration.endswith("calibration.txt") and report.measured.text.endswith("evaluation.txt")


def test_calibration_is_closer_to_the_source_at_equal_size(model, tmp_path, texts):
    reports = {
        method: quantize(
            model, tmp_path / method, bits=3, method=method, evaluation=texts[1],
            calibration=None if method == "round" else texts[0],
        )
        for method in ("round", "gptq", "awq")
    }  # fmt: skip
    kl = {method: report.measured.kl for method, report in reports.items()}
    assert kl["gptq"] < 0.8 * kl["round"] and kl["awq"] < kl["round"]
    assert len({report.bits_per_weight for report in reports.values()}) == 1


def test_the_report_agrees_with_the_files(model, tmp_path, texts, pictures):
    phases = []
    report = quantize(
        model, tmp_path / "out", bits=4, evaluation=texts[1], progress=lambda phase, done, total: phases.append(phase)
    )
    assert report.bytes == needed_bytes(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert (tmp_path / "out" / "quantization.png").read_bytes().startswith(b"\x89PNG")
    values = sum(t.nbytes for t in open_checkpoint(tmp_path / "out").tensors.values())
    assert report.bits_per_weight == pytest.approx(8 * values / report.parameters) and report.bits_per_weight > 4.5
    assert report.source_bits_per_weight == 16
    assert set(report.errors) == set(report.bits) and set(report.worst()) <= set(report.errors)
    assert 0.05 < report.errors["model.layers.0.self_attn.q_proj"] < 0.2
    assert 0 < report.measured.kl < 1 and 0.2 < report.measured.top1 <= 1
    assert {"writing", "comparing with the source"} <= set(phases)
    assert not list((tmp_path / "out").glob(".*")) and not list(tmp_path.glob(".*"))


def test_families_that_store_matrices_together(write_model, tmp_path, texts):
    config = write_model(tmp_path / "source", model_type="phi3", tie_word_embeddings=False)
    report = quantize(tmp_path / "source", tmp_path / "out", method="gptq", calibration=texts[0], evaluation=texts[1])
    assert "model.layers.0.self_attn.qkv_proj" in report.formats
    assert "model.layers.0.self_attn.qkv_proj.scales" in load_weights(tmp_path / "out")
    assert report.measured.kl < 0.5 and config.model_type == "phi3"
    searched = quantize(
        tmp_path / "source", tmp_path / "searched", bits_per_weight=4, calibration=texts[0], measure=False
    )
    assert searched.bits_per_weight <= 4 and len({str(chosen) for chosen in searched.formats.values()}) > 1


def test_layers_that_no_size_divides_are_left_and_listed(write_model, tmp_path, texts):
    write_model(tmp_path / "source", hidden_size=96, intermediate_size=100)
    report = quantize(tmp_path / "source", tmp_path / "out", method="awq", calibration=texts[0], evaluation=texts[1])
    assert report.skipped == {f"model.layers.{i}.mlp.down_proj": 100 for i in range(2)}
    assert report.regrouped["model.layers.0.self_attn.q_proj"] == 32
    assert report.formats["model.layers.0.mlp.down_proj"] is None
    assert "model.layers.0.mlp.down_proj" not in report.errors


def test_a_budget_is_kept_by_the_bytes_on_disk(model, tmp_path, texts):
    beside = needed_bytes(model) - weights_bytes(model)
    budget = beside + 60_000
    report = quantize(model, tmp_path / "out", budget=budget, calibration=texts[0], measure=False)
    assert budget - 4_000 < needed_bytes(tmp_path / "out") == report.bytes <= budget
    with pytest.raises(ConfigError, match=r"1000 bytes can't be reached \(try: \d+ or more") as error:
        quantize(model, tmp_path / "small", budget=1000, calibration=texts[0], measure=False)
    least = int(error.value.hint.split()[0])
    smallest = quantize(model, tmp_path / "least", budget=least, calibration=texts[0], measure=False)
    assert smallest.bytes <= least and set(smallest.bits.values()) == {2}


def test_bits_per_weight_are_kept_and_better_spent_than_evenly(model, tmp_path, texts):
    even = quantize(model, tmp_path / "even", bits=3, evaluation=texts[1])
    target = even.bits_per_weight
    report = quantize(model, tmp_path / "out", bits_per_weight=target, calibration=texts[0], evaluation=texts[1])
    assert target - 0.1 < report.bits_per_weight <= target
    assert report.measured.kl < even.measured.kl
    with pytest.raises(ConfigError, match="1.5 bits per weight can't be reached.*2.* or more"):
        quantize(model, tmp_path / "none", bits_per_weight=1.5, calibration=texts[0])


def test_a_bound_on_the_divergence_is_kept_as_measured(model, tmp_path, texts):
    settings = {"calibration": texts[0], "evaluation": texts[1]}
    report = quantize(model, tmp_path / "out", max_kl=0.05, **settings)
    assert report.measured.kl <= 0.05 and 2.5 < report.bits_per_weight < 8
    with pytest.raises(ConfigError, match="a KL divergence of 1e-12 can't be reached: the most bits give"):
        quantize(model, tmp_path / "none", max_kl=1e-12, **settings)
    assert not (tmp_path / "none").exists()


def test_walking_up_the_hull_spends_the_budget(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    costs = {
        matrix.name: {Format(bits): weight * 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)}
        for weight, matrix in enumerate(plan.matrices, start=1)
    }
    smallest, path = search.steps(plan, costs)
    rates = [step.saved / step.nbytes for step in path]
    assert rates == sorted(rates, reverse=True) and set(smallest.formats.values()) == {Format(2)}
    for extra in (0, 5_000, 20_000, 10**9):
        found = search.within(plan, costs, smallest.nbytes() + extra)
        assert found.nbytes() <= smallest.nbytes() + extra
    assert set(found.formats.values()) == {Format(8)}
    with pytest.raises(ConfigError, match="at least"):
        search.within(plan, costs, smallest.nbytes() - 1)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 7}, "7 bits are not a format of mode affine"),
        ({"mode": "int4"}, "'int4' is not a mode"),
        ({"mode": "mxfp4", "method": "gptq"}, "GPTQ is made for affine"),
        ({"method": "magic"}, "there is no method 'magic'"),
        ({"recipe": "mixed_3_4", "max_kl": 1.0}, "recipe and max_kl both decide"),
        ({"bits": 4, "budget": 10**6}, "bits have no effect"),
        ({"mode": "nvfp4", "bits_per_weight": 4.0}, "nvfp4 has none"),
        ({"max_kl": -1.0}, "must be a positive number"),
        ({"calibration": "x.txt"}, "no effect on plain rounding"),
        ({"evaluation": "x.txt", "measure": False}, "no effect without measuring"),
    ],
)
def test_settings_that_can_not_work(model, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        quantize(model, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_can_not_be_quantized(model, write_model, tmp_path, texts):
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(model, model)
    quantize(model, tmp_path / "4bit", measure=False)
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "4bit", tmp_path / "again")
    write_model(tmp_path / "nan")
    weights = load_weights(tmp_path / "nan")
    broken = {name: np.nan * w if "1.mlp.up" in name else w for name, w in weights.items()}
    mx.eval(broken)
    save_weights(tmp_path / "nan", broken)
    for method in ("round", "gptq"):
        calibration = None if method == "round" else texts[0]
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* not finite"):
            quantize(tmp_path / "nan", tmp_path / "out", method=method, calibration=calibration, evaluation=texts[1])
    (tmp_path / "short.txt").write_text("A cat")
    with pytest.raises(DataError, match="too few|too little"):
        quantize(model, tmp_path / "out", method="gptq", calibration=tmp_path / "short.txt", evaluation=texts[1])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_calibration_and_evaluation_never_share_text(model, tmp_path, tiny_tokenizer, texts):
    from mlxlm.quantize.text import calibration_and_evaluation

    for first, second in (
        calibration_and_evaluation(model, tiny_tokenizer, None, None),
        calibration_and_evaluation(model, tiny_tokenizer, texts[0], None),
    ):
        assert first.name != second.name
        tail = second.tokens[:40].tolist()
        there = first.tokens.tolist()
        assert not any(there[i : i + 40] == tail for i in range(len(there)))
        assert second.bytes == len(tiny_tokenizer.decode(second.tokens[1:]).encode())
