"""Whole models: what is written, what mlx_lm reads, what quantization costs, and which settings are rejected."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import mlxlm
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint import load_weights, save_weights
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.tokenizer_files import copy_tokenizer as carry
from mlxlm.convert import convert
from mlxlm.convert.compare import compare
from mlxlm.convert.reference_backends import BackendOutput, BackendRejected
from mlxlm.quantize import PLOT_FILE, REPORT_FILE, bit_search, bit_targets, quantize, text
from mlxlm.quantize.methods import quantize_calibrated
from mlxlm.quantize.quantization_plan import Format, uniform
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError, MlxlmError


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
    quantize(model, tmp_path / "ours", **settings, evaluate=False)
    theirs = {"q_bits": settings.get("bits"), "q_group_size": settings.get("group_size")}
    if "recipe" in settings:
        theirs = {"quant_predicate": settings["recipe"], "q_group_size": 64}
    convert(str(model), str(tmp_path / "theirs"), quantize=True, q_mode=settings.get("mode", "affine"), **theirs)
    ours, reference = (load_weights(tmp_path / name) for name in ("ours", "theirs"))
    assert set(ours) == set(reference)
    for name, value in reference.items():
        assert ours[name].dtype == value.dtype and mx.array_equal(ours[name], value), name


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_rounding_of_other_dtypes(write_model, tmp_path, dtype):
    """A float32 model becomes one of float16 first, for which mlx_lm has to be asked."""
    mlx_lm = pytest.importorskip("mlx_lm.convert")
    write_model(tmp_path / "source", dtype)
    quantize(tmp_path / "source", tmp_path / "ours", evaluate=False)
    asked = "float16" if dtype == mx.float32 else None
    mlx_lm.convert(str(tmp_path / "source"), str(tmp_path / "theirs"), quantize=True, dtype=asked)
    ours, theirs = (load_weights(tmp_path / name) for name in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and mx.array_equal(ours[name], value), name


@pytest.mark.parametrize(
    "settings", [{"method": "gptq", "bits": 3}, {"method": "awq"}, {"recipe": "mixed_2_6", "method": "gptq"}], ids=str
)
def test_calibrated_models_are_read_by_mlx_lm(model, tmp_path, texts, settings):
    mlx_lm = pytest.importorskip("mlx_lm")
    report = quantize(model, tmp_path / "out", **settings, calibration_text=texts[0], eval_text=texts[1], verify=False)
    assert report.checks == []
    theirs, _ = mlx_lm.load(str(tmp_path / "out"))
    theirs.set_dtype(mx.float32)
    tokens = mx.array([[5, 60, 7, 200, 9, 11]])
    ours = mlxlm.load(tmp_path / "out").model(tokens)
    assert mx.abs(theirs(tokens) - ours).max().item() < 1e-3
    assert report.calibration_text.endswith("calibration.txt") and report.metrics.text.endswith("evaluation.txt")


def test_calibration_is_closer_to_the_source_at_equal_size(model, tmp_path, texts):
    reports = {
        method: quantize(
            model, tmp_path / method, bits=3, method=method, eval_text=texts[1],
            calibration_text=None if method == "rtn" else texts[0],
        )
        for method in ("rtn", "gptq", "awq")
    }  # fmt: skip
    kl = {method: report.metrics.kl for method, report in reports.items()}
    assert kl["gptq"] < 0.8 * kl["rtn"] and kl["awq"] < kl["rtn"]
    assert len({report.bits_per_weight for report in reports.values()}) == 1


def test_the_report_agrees_with_the_files(model, tmp_path, texts, plots):
    phases = []
    report = quantize(
        model, tmp_path / "out", bits=4, eval_text=texts[1], progress=lambda phase, done, total: phases.append(phase)
    )
    assert report.bytes == needed_bytes(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert (tmp_path / "out" / "quantization.png").read_bytes().startswith(b"\x89PNG")
    values = sum(t.nbytes for t in open_checkpoint(tmp_path / "out").tensors.values())
    assert report.bits_per_weight == pytest.approx(8 * values / report.parameters) and report.bits_per_weight > 4.5
    assert report.source_bits_per_weight == 16
    assert set(report.errors) == set(report.bits) and set(report.worst_layers()) <= set(report.errors)
    assert 0.05 < report.errors["model.layers.0.self_attn.q_proj"] < 0.2
    assert 0 < report.metrics.kl < 1 and 0.2 < report.metrics.top1_agreement <= 1
    assert {"writing", "comparing with the source"} <= set(phases)
    assert not list((tmp_path / "out").glob(".*")) and not list(tmp_path.glob(".*"))


def test_families_that_store_matrices_together(write_model, tmp_path, texts):
    config = write_model(tmp_path / "source", model_type="phi3", tie_word_embeddings=False)
    report = quantize(
        tmp_path / "source", tmp_path / "out", method="gptq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert "model.layers.0.self_attn.qkv_proj" in report.formats
    assert "model.layers.0.self_attn.qkv_proj.scales" in load_weights(tmp_path / "out")
    assert report.metrics.kl < 0.5 and config.model_type == "phi3"
    searched = quantize(
        tmp_path / "source", tmp_path / "searched", target_bpw=4, calibration_text=texts[0], evaluate=False
    )
    assert searched.bits_per_weight <= 4 and len({str(chosen) for chosen in searched.formats.values()}) > 1


def test_a_picture_of_a_family_with_other_names_in_its_files(write_model, tmp_path, plots):
    neox = {
        "model_type": "gpt_neox", "norm": "layer", "parallel_residual": True, "mlp_gated": False, "hidden_act": "gelu",
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
        "intermediate_size": 256,
    }  # fmt: skip
    write_model(tmp_path / "source", **neox)
    report = quantize(tmp_path / "source", tmp_path / "out", evaluate=False)
    assert "model.h.0.attention.query_key_value" in report.formats
    assert (tmp_path / "out" / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def test_layers_that_no_size_divides_are_left_and_listed(write_model, tmp_path, texts):
    write_model(tmp_path / "source", hidden_size=96, intermediate_size=100)
    report = quantize(
        tmp_path / "source", tmp_path / "out", method="awq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert report.skipped == {f"model.layers.{i}.mlp.down_proj": 100 for i in range(2)}
    assert report.reduced_group_sizes["model.layers.0.self_attn.q_proj"] == 32
    assert report.formats["model.layers.0.mlp.down_proj"] is None
    assert "model.layers.0.mlp.down_proj" not in report.errors


def test_a_budget_is_kept_by_the_bytes_on_disk(model, tmp_path, texts):
    beside = needed_bytes(model) - weights_bytes(model)
    max_size = beside + 60_000
    report = quantize(model, tmp_path / "out", max_size=max_size, calibration_text=texts[0], evaluate=False)
    assert max_size - 4_000 < needed_bytes(tmp_path / "out") == report.bytes <= max_size
    with pytest.raises(ConfigError, match=r"1000 bytes can't be reached \(try: \d+ or more") as error:
        quantize(model, tmp_path / "small", max_size=1000, calibration_text=texts[0], evaluate=False)
    least = int(error.value.hint.split()[0])
    smallest = quantize(model, tmp_path / "least", max_size=least, calibration_text=texts[0], evaluate=False)
    assert smallest.bytes <= least and set(smallest.bits.values()) == {2}


def test_bits_per_weight_are_kept_and_better_spent_than_evenly(model, tmp_path, texts):
    even = quantize(model, tmp_path / "even", bits=3, eval_text=texts[1])
    target = even.bits_per_weight
    report = quantize(model, tmp_path / "out", target_bpw=target, calibration_text=texts[0], eval_text=texts[1])
    assert target - 0.1 < report.bits_per_weight <= target
    assert report.metrics.kl < even.metrics.kl
    with pytest.raises(ConfigError, match="1.5 bits per weight can't be reached.*2.* or more"):
        quantize(model, tmp_path / "none", target_bpw=1.5, calibration_text=texts[0])


def test_a_bound_on_the_divergence_is_kept_as_measured(model, tmp_path, texts):
    settings = {"calibration_text": texts[0], "eval_text": texts[1]}
    report = quantize(model, tmp_path / "out", max_kl=0.05, **settings)
    assert report.metrics.kl <= 0.05 and 2.5 < report.bits_per_weight < 8
    with pytest.raises(ConfigError, match="a KL divergence of 1e-12 can't be reached: the most bits give"):
        quantize(model, tmp_path / "none", max_kl=1e-12, **settings)
    assert not (tmp_path / "none").exists()


def test_walking_up_the_hull_spends_the_budget(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    sensitivities = {
        matrix.name: {Format(bits): weight * 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)}
        for weight, matrix in enumerate(plan.matrices, start=1)
    }
    smallest, path = bit_search.upgrade_path(plan, sensitivities)
    rates = [step.saved / step.nbytes for step in path]
    assert rates == sorted(rates, reverse=True) and set(smallest.formats.values()) == {Format(2)}
    for extra in (0, 5_000, 20_000, 10**9):
        found = bit_search.fit_to_size(plan, sensitivities, smallest.nbytes() + extra)
        assert found.nbytes() <= smallest.nbytes() + extra
    assert set(found.formats.values()) == {Format(8)}
    with pytest.raises(ValueError, match="the smallest plan takes"):
        bit_search.fit_to_size(plan, sensitivities, smallest.nbytes() - 1)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 7}, "bits 7 is not available in mode affine"),
        ({"mode": "int4"}, "'int4' is not a quantization mode"),
        ({"mode": "mxfp4", "method": "gptq"}, "`method` gptq needs `mode` affine"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"recipe": "mixed_3_4", "max_kl": 1.0}, "`recipe` and `max_kl` both choose"),
        ({"bits": 4, "max_size": 10**6}, "`bits` and `max_size` both choose"),
        ({"mode": "nvfp4", "target_bpw": 4.0}, "`target_bpw` would have no effect: nvfp4 has fixed bits"),
        ({"max_kl": -1.0}, "must be a positive number"),
        ({"calibration_text": "x.txt"}, "`calibration_text` would have no effect"),
        ({"cross_check": True, "verify": False}, "`cross_check` would have no effect"),
        ({"eval_text": "x.txt", "evaluate": False}, "`eval_text` would have no effect"),
    ],
)
def test_settings_that_can_not_work(model, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        quantize(model, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []


def test_sources_that_can_not_be_quantized(model, write_model, tmp_path, texts):
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(model, model)
    quantize(model, tmp_path / "4bit", evaluate=False)
    with pytest.raises(CheckpointError, match="already quantized"):
        quantize(tmp_path / "4bit", tmp_path / "again")
    write_model(tmp_path / "nan")
    weights = load_weights(tmp_path / "nan")
    broken = {name: np.nan * w if "1.mlp.up" in name else w for name, w in weights.items()}
    mx.eval(broken)
    save_weights(tmp_path / "nan", broken)
    for method in ("rtn", "gptq"):
        calibration_text = None if method == "rtn" else texts[0]
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* not finite"):
            quantize(
                tmp_path / "nan", tmp_path / "out", method=method, calibration_text=calibration_text, eval_text=texts[1]
            )
    (tmp_path / "short.txt").write_text("A cat")
    with pytest.raises(DataError, match="too few|too little"):
        quantize(model, tmp_path / "out", method="gptq", calibration_text=tmp_path / "short.txt", eval_text=texts[1])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_calibration_and_evaluation_never_share_text(model, tmp_path, tiny_tokenizer, texts):
    for given in (None, texts[0]):
        first = text.calibration_text(model, tiny_tokenizer, given, whole=False)
        second = text.eval_text(model, tiny_tokenizer, None, given)
        assert first.name != second.name
        [ids] = second.documents
        tail = ids[:40]
        there = first.tokens.tolist()
        assert not any(there[i : i + 40] == tail for i in range(len(there)))
        predicted = ids if ids[0] == tiny_tokenizer.bos_id else ids[1:]
        assert second.bytes == len(tiny_tokenizer.decode(predicted).encode())
    whole = text.calibration_text(model, tiny_tokenizer, texts[0], whole=True)
    assert len(whole.tokens) > len(first.tokens)


def test_documents_are_apart(tiny_tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"text": "one"}\n{"messages": [{"role": "user", "content": "a"}, {"role": "b", "content": "c"}]}\n'
    )
    assert tiny_tokenizer.decode(text.text_of_file(file, tiny_tokenizer, 100).tokens.tolist()) == "one\n\na\n\nc"
    found = text.eval_text(None, tiny_tokenizer, file, None)
    assert [tiny_tokenizer.decode(ids) for ids in found.documents] == ["one", "a\n\nc"]


def test_texts_that_are_given_free_a_run_from_its_data(model, tmp_path, texts):
    shutil.copytree(model, tmp_path / "run")
    (tmp_path / "run" / "train.json").write_text("{}")
    step = tmp_path / "run" / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    (tmp_path / "run" / "model.safetensors").rename(step / "model.safetensors")
    report = quantize(tmp_path / "run", tmp_path / "out", eval_text=texts[1])
    assert report.metrics.text.endswith("evaluation.txt")
    with pytest.raises(MlxlmError, match="--calibration-text FILE"):
        quantize(tmp_path / "run", tmp_path / "gptq", method="gptq", eval_text=texts[1])
    with pytest.raises(MlxlmError, match="--eval-text FILE"):
        quantize(tmp_path / "run", tmp_path / "measured")


def test_what_was_written_is_checked(model, tmp_path):
    pytest.importorskip("mlx_lm")
    report = quantize(model, tmp_path / "out", bits=4, evaluate=False, cross_check=True)
    assert {check.name: check.result for check in report.checks} == dict.fromkeys(
        ("tensors", "tokenizer", "configuration", "mlx_lm"), "equal"
    )
    assert report.to_dict()["checks"][0]["name"] == "tensors"


def test_a_disk_that_changes_values_is_noticed(model, tmp_path, monkeypatch):
    def spoil(folder, *arguments):
        written = load_weights(folder)
        written["model.norm.weight"] = written["model.norm.weight"] + 1
        mx.eval(written)
        save_weights(folder, written)
        return []

    monkeypatch.setattr(
        "mlxlm.quantize.pipeline.copy_tokenizer", lambda source, folder: spoil(folder) or carry(source, folder)
    )
    with pytest.raises(CheckpointError, match=r"out: model.norm.weight is not what was written"):
        quantize(model, tmp_path / "out", evaluate=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_mlx_lm_refuses_is_an_error(model, tmp_path, monkeypatch):
    def refuses(backend, path, *arguments, **options):
        if "source" not in str(path):
            raise BackendRejected(f"{backend} can't read it: {path} is wrong")
        return BackendOutput([0] * 32, [0.0] * 32, 1.0)

    monkeypatch.setattr("mlxlm.convert.reference_backends.run_backend", refuses)
    with pytest.raises(CheckpointError, match="mlx_lm can't read it.*without cross_check"):
        quantize(model, tmp_path / "out", evaluate=False, cross_check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, hint", [("q.gguf", "mlxlm convert SOURCE"), ("q.bin", "for a folder"), ("Q.PT", "Q,")])
def test_outputs_are_folders(model, tmp_path, name, hint):
    with pytest.raises(ConfigError, match=f"writes a folder, not {name}.*{hint}"):
        quantize(model, tmp_path / name)


def test_models_without_a_matrix_to_quantize_are_refused(write_model, tmp_path):
    write_model(tmp_path / "source", hidden_size=40, intermediate_size=56)
    with pytest.raises(CheckpointError, match="no matrix can be quantized: widths are 40, 56, group sizes 32, 64"):
        quantize(tmp_path / "source", tmp_path / "out", max_size=10**9)
    assert not (tmp_path / "out").exists()


def test_what_takes_away_from_the_figures_is_said(model, tmp_path, texts):
    gguf = tmp_path / "source.gguf"
    convert(model, gguf, outtype="Q8_0", verify_output=False)
    (tmp_path / "short.txt").write_text("The cat sat on the mat and then it ran away from the dog in the house.")
    report = quantize(gguf, tmp_path / "out", eval_text=tmp_path / "short.txt", verify=False)
    assert any("already quantized (Q8_0)" in warning for warning in report.warnings)
    assert any("fewer than 256 say little" in warning for warning in report.warnings)
    clean = quantize(model, tmp_path / "clean", eval_text=texts[1])
    assert clean.warnings == [] and clean.metrics.speed_before > 0


def test_room_that_is_left_is_spent(model, tmp_path, texts, monkeypatch):
    monkeypatch.setattr("mlxlm.quantize.bit_search._Probe.kl_divergence", lambda probe, module: 0.0)
    report = quantize(model, tmp_path / "out", max_size=10**9, calibration_text=texts[0], evaluate=False)
    assert set(report.bits.values()) == {8}


def test_a_probe_has_no_rounding_below_nothing(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(8))
    windows = np.arange(64, dtype=np.int32)[None] + 20
    for cost in bit_search.sensitivities(checkpoint, plan, windows).values():
        values = [cost[chosen] for chosen in sorted(cost, key=lambda chosen: chosen.bits)]
        assert values == sorted(values, reverse=True) and values[-1] > 0


def test_one_candidate_is_on_disk_at_a_time(model, tmp_path, texts, monkeypatch):
    num_folders = []
    quantize_tensors = bit_targets.quantize_tensors

    def watched(source, plan, method, texts, scratch, *rest):
        num_folders.append(len(list(scratch.parent.iterdir())))
        return quantize_tensors(source, plan, method, texts, scratch, *rest)

    monkeypatch.setattr(bit_targets, "quantize_tensors", watched)
    report = quantize(
        model, tmp_path / "out", max_kl=0.05, method="gptq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert len(num_folders) > 2 and max(num_folders) <= 2  # the best so far, and the current one
    assert report.metrics.kl <= 0.05


def test_no_plan_is_measured_twice(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    sensitivities = {m.name: {Format(bits): 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)} for m in plan.matrices}
    metrics = []

    def evaluate(plan) -> float:
        metrics.append(plan.nbytes())
        return 1.0

    with pytest.raises(ConfigError, match="the most bits give 1"):
        bit_search.fit_to_kl(plan, sensitivities, 1e-9, evaluate)
    assert len(metrics) == len(set(metrics))


def test_the_tables_of_embeddings_are_read_once(write_model, tmp_path, texts):
    """One for each pass, whatever the number of batches: nothing keeps a copy of the table."""
    write_model(tmp_path / "source", tie_word_embeddings=False)
    checkpoint = open_checkpoint(tmp_path / "source")
    reads: dict[str, int] = {}

    def counted(name, tensor):
        def count(value):
            reads[name] = reads.get(name, 0) + 1
            return value

        return tensor.transform(count)

    counting = replace(checkpoint, tensors={n: counted(n, t) for n, t in checkpoint.tensors.items()})
    ids = (np.arange(8000) % 290).tolist()
    compare(counting, checkpoint, [ids])
    assert (
        reads["model.embed_tokens.weight"] == 2 and reads["model.layers.0.mlp.up_proj.weight"] == 1
    )  # and for the head
    reads.clear()
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    windows = np.array(ids, np.int32).reshape(-1, 100)
    (tmp_path / "scratch").mkdir()
    quantize_calibrated(counting, plan, "gptq", windows, tmp_path / "scratch")
    assert reads["model.embed_tokens.weight"] == 2 and reads["lm_head.weight"] == 1  # quantized, and run as it was


@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers are another matter")
def test_buffers_are_given_back(model, tmp_path):
    """MLX's cache of freed buffers stays small meanwhile, and has its own limit again afterwards."""
    limits = []

    def note(*_):
        limits.append(mx.set_cache_limit(1 << 20))
        mx.set_cache_limit(limits[-1])

    before = mx.set_cache_limit(1 << 31)
    try:
        quantize(model, tmp_path / "out", evaluate=False, verify=False, progress=note)
        assert max(limits) < 1 << 30 and mx.set_cache_limit(before) == 1 << 31
    finally:
        mx.set_cache_limit(before)
