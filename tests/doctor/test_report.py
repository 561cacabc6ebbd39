"""The report: a JSON file and a summary."""

import json
import sys

import pytest

from mlxlm.doctor import check_machine
from mlxlm.doctor.check import Result
from mlxlm.doctor.facts import report_facts
from mlxlm.doctor.report import Report, summarize, summarize_metal_kernels
from mlxlm.utils.errors import CheckpointError

ERROR = {"error": 0.0012, "tolerance": 0.005, "kernels": ["rms_norm", "rms_norm_grad"]}
CHOICE, FASTEST = {"case": "c", "path": "metal", "why": "w"}, {"in_use": "mlx", "fastest": "mlx"}
OTHER = {"in_use": "mlx", "fastest": "blockwise"}
RESULTS = [
    Result("decoding", "speed", "", "passed", "", {"tokens_per_second": 1234.5, "share_of_bandwidth": 0.61}, 2.0),
    Result("training", "resumed", "", "failed", "losses <differ>", {"equal_losses": False}, 1.0, "Traceback <here>"),
    Result("kernels", "rms_norm, metal", "float16 N=64", "passed", "", ERROR, 0.25),
    Result("kernels", "rms_norm, metal", "float16 N=96", "failed", "wrong", {**ERROR, "error": 0.3}, 0.25),
    Result("kernels", "rms_norm, metal", "float16 N=128", "failed", "NaN", {**ERROR, "error": None}, 0.25),
    Result("kernels", "in use", "", "passed", "", {"metal": 1, "operations": [CHOICE]}),
    Result("kernel benchmarks", "rms_norm", "N=64", "passed", "", {**FASTEST, "metal_speedup": 0.8}),
    Result("kernel benchmarks", "rms_norm", "N=96", "passed", "", {**OTHER, "metal_speedup": 1.5}),
    Result("kernel benchmarks", "other", "", "passed", "", OTHER),
    Result("decoding", "4 bits", "", "skipped", "not here"),
]  # fmt: skip


@pytest.fixture
def report():
    facts = {"chip": "Apple M2", "device": "GPU (x)", "memory_bytes": 16e9, "packages": {"mlx": "0.32.2"}}
    return Report(facts, RESULTS, "2026-01-02 03:04", 75.0)


def test_summary():
    rows = {row[:2]: (row[2], row[4], row[3]) for row in summarize(RESULTS)}
    assert rows == {
        ("decoding", "speed"): ("passed", "1,234 tokens/s, 61% of memory bandwidth", "2.0 s"),
        ("training", "resumed"): ("failed", "losses <differ>", "1.0 s"),
        ("kernels", "rms_norm, metal"): ("2 of 3 failed", "relative error at most 0.3, allowed 0.005", "0.8 s"),
        ("kernels", "in use"): ("passed", "Metal kernels in 1 cases", "0.0 s"),
        ("kernel benchmarks", "rms_norm"): (
            "2 passed",
            "Metal kernels 0.8 to 1.5 times as fast as MLX's operations; the implementation in use is the fastest in "
            "1 of 2",
            "0.0 s",
        ),
        ("kernel benchmarks", "other"): ("passed", "the implementation in use is the fastest in 0 of 1", "0.0 s"),
        ("decoding", "4 bits"): ("skipped", "not here", "0.0 s"),
    }


def test_metal_kernels():
    rows = {name: row for name, *row in summarize_metal_kernels(RESULTS)}
    assert rows["rms_norm_grad"] == ["3", "2", "3.0e-01"] and rows["attention_decode"] == ["0", "–", "–"]
    assert summarize_metal_kernels(RESULTS[:2]) == []  # a machine without Metal


def test_file(report, tmp_path):
    report.write(tmp_path / "new" / "report.json")
    stored = json.loads((tmp_path / "new/report.json").read_text())
    assert [check["status"] for check in stored["checks"]] == [result.status for result in RESULTS]
    assert stored["facts"] == report.facts and stored["seconds"] == 75.0
    assert report.headline == "6 passed, 3 failed, 1 skipped in 1m15s"
    with pytest.raises(CheckpointError, match="already exists"):
        report.write(tmp_path / "new" / "report.json")


def test_facts_of_this_machine():
    facts = report_facts()
    assert facts["memory_bytes"] > 0 and facts["python"] == sys.version.split()[0] and facts["system"]
    assert facts["packages"]["mlx"] and facts["packages"]["mlxlm"]
    assert "/" not in json.dumps({**facts, "system": ""})


def test_check_machine_reports_progress():
    shown = []
    report = check_machine(lambda *step: shown.append(step), [(None, 2), (RESULTS[0], 2), (RESULTS[1], 2)])
    assert shown == [("listing the checks", 0, 2), ("decoding", 1, 2), ("training", 2, 2)]
    assert report.results == RESULTS[:2] and report.failed == [RESULTS[1]] and report.facts["chip"]
