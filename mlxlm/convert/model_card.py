"""Model cards: a README.md of what was measured, for a folder or a repository of the hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.locations import QUANTIZATION_PLOT, QUANTIZATION_REPORT, is_run_folder
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert.inspect import describe
from mlxlm.report.log_entries import number
from mlxlm.report.runs import read_run
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.formatting import human_bytes, human_count
from mlxlm.utils.json_files import read_json_object

CARD = "README.md"
_MAX_REPORT = 16 << 20  # bytes


def is_generated(folder: Path) -> bool:
    """Whether the README.md of a folder is the `model_card` that mlxlm wrote, without a change."""
    if not (folder / CARD).is_file():
        return False
    text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^# (.+)$", text, re.MULTILINE)
    return name is not None and text == model_card(folder, name[1])


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def model_card(path: Path, id: str, license: str | None = None) -> str:
    """A README.md in Markdown: size, how to run the model, and the cost of quantization or the training.

    The figures are those of the quantization report in the folder, or of the run's log.

    Args:
        path: The model.
        id: `owner/name` on the hub, or the name of the folder.
        license: Identifier of the license, as the hub names it.
    """
    report = _quantization_report(path)
    metadata = {"library_name": "gguf" if is_gguf(path) else "mlx", "pipeline_tag": "text-generation"}
    if license:
        metadata["license"] = license
    if hub.is_id(source := str(report.get("source", ""))) and not Path(source).exists():
        metadata |= {"base_model": source.partition("@")[0].partition(":")[0], "base_model_relation": "quantized"}
    header = [f"{name}: {value}" for name, value in metadata.items()]
    lines = ["---", *header, "tags:", "- mlx", "- mlxlm", "---", "", f"# {id.rpartition('/')[2]}"]
    lines += [*_facts(path), *_usage(path, id)]
    if report:
        lines += _quantization(report, has_plot=(path / QUANTIZATION_PLOT).is_file())
    if path.is_dir() and is_run_folder(path):
        lines += _training(path)
    return "\n".join(lines) + "\n"


def _quantization_report(path: Path) -> dict[str, Any]:
    report = path / QUANTIZATION_REPORT
    return read_json_object(report, _MAX_REPORT, CheckpointError) if report.is_file() else {}


def _facts(path: Path) -> Iterator[str]:
    facts = describe(open_checkpoint(path))
    yield from _table({
        "family": facts.family,
        **facts.architecture,
        "parameters": human_count(facts.parameters),
        "size": f"{human_bytes(facts.bytes)}, {facts.bits_per_weight:.2f} bits per weight",
    })  # fmt: skip


def _usage(path: Path, id: str) -> Iterator[str]:
    other = f"llama-cli -hf {id}" if is_gguf(path) else f'mlx_lm.generate --model {id} --prompt "Hello"'
    yield from ("", "## Usage", "", "```shell", f"mlxlm chat {id}", other, "```")


def _quantization(report: Mapping[str, Any], has_plot: bool) -> Iterator[str]:
    method, text = report.get("method"), report.get("calibration_text")
    calibrated = f", calibrated on {text}" if text else ""
    yield from ("", "## Quantization", "", f"Quantized with mlxlm ({method}{calibrated}).")
    metrics = report.get("metrics")
    if isinstance(metrics, Mapping):
        names = ("tokens", "kl", "top1_agreement", "bits_per_byte_before", "bits_per_byte_after")
        figures = {name: number(metrics.get(name)) for name in names}
        yield f"Compared with its source on {figures['tokens']:.0f} tokens of {metrics.get('text')}:"
        yield from _table({
            "KL divergence from the source": f"{figures['kl']:.4f} nats per token",
            "same most likely token": f"{100 * figures['top1_agreement']:.1f} %",
            "bits per byte": f"{figures['bits_per_byte_after']:.4f}, source {figures['bits_per_byte_before']:.4f}",
        })  # fmt: skip
    options = report.get("settings")
    if isinstance(options, Mapping):
        command = ["mlxlm", "quantize", str(report.get("source")), "--out", "NEW"]
        for name, value in options.items():
            flag = name.replace("_", "-")
            command += (
                [f"--{flag}"] if value is True else [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
            )
        yield from ("", "To repeat it:", "", "```shell", shlex.join(command), "```")
    if has_plot:
        yield from ("", f"![Error of each matrix by layer]({QUANTIZATION_PLOT})")


def _training(path: Path) -> Iterator[str]:
    run = read_run(path)
    yield from ("", "## Training", "", "Trained with mlxlm.")
    figures = {"steps": f"{run.last('step'):.0f}", "tokens": human_count(run.last("tokens"))}
    if run.best:
        figures["best validation"] = f"{run.best.bits_per_byte:.4f} bits per byte, {run.best.loss:.4f} nats per token"
    yield from _table(figures)


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    yield from ("", "| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in rows.items())
