"""Upload a model to the Hugging Face hub, with a model card of what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.locations import (
    QUANTIZATION_PLOT,
    QUANTIZATION_REPORT,
    RUN_FILE,
    gguf_models,
    is_run_folder,
    locate,
)
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert.inspect import describe
from mlxlm.report.log_entries import number
from mlxlm.report.runs import read_run
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.formatting import human_bytes, human_count
from mlxlm.utils.json_files import read_json_object

CARD = "README.md"
_FILES = ("*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt", "LICENSE*", CARD, QUANTIZATION_PLOT)
_WEIGHTS = "model*.safetensors"
_MAX_REPORT = 16 << 20  # bytes


def upload(path: Path, id: str, *, license: str | None = None, private: bool = False) -> str:
    """Upload a model in one commit, to a new repository or as the next version of an existing one.

    Without a README.md in the folder, a new repository gets the `model_card`, and an existing one keeps its own.

    Args:
        path: A folder with safetensors, a run (its best checkpoint), or a .gguf file with the other parts of its model.
        id: `owner/name` on the hub.
        license: Identifier of the license for the model card, such as "apache-2.0".
        private: Whether a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        CheckpointError: There is no such model, or it can't be uploaded.
    """
    files = model_files(path)
    card = model_card(path, id, license).encode() if CARD not in files else None
    return hub.upload(files, {CARD: card} if card else {}, id, private=private, replaced=_WEIGHTS)


def model_files(path: Path) -> dict[str, Path]:
    """The files to upload, by name. Of a run these are the best checkpoint and the tokenizer.

    Raises:
        CheckpointError: There is no model, or one in a format that others don't load.
    """
    if _is_gguf(path):
        parts = next((model for model in gguf_models(path.parent) if path in model), [])
        if not parts:
            raise CheckpointError(f"there is no file {path}", "a .gguf file, a model folder or a run")
        return {file.name: file for file in parts}
    location = locate(path)
    weights = {file.name: file for file in sorted(location.weights.glob(_WEIGHTS))}
    if not weights:
        raise CheckpointError(f"{path} has no safetensors", f"mlxlm convert {path} --out FOLDER first")
    others = {file.name: file for pattern in _FILES for file in sorted(location.root.glob(pattern))}
    others.pop(RUN_FILE, None)
    return {**others, **weights}


def model_card(path: Path, id: str, license: str | None = None) -> str:
    """A README.md in Markdown for `owner/name`: size, how to run it, and the cost of quantization or the training.

    The figures are those of the quantization report in the folder, or of the run's log.
    """
    report = _quantization_report(path)
    metadata = {"library_name": "gguf" if _is_gguf(path) else "mlx", "pipeline_tag": "text-generation"}
    if license:
        metadata["license"] = license
    if hub.is_id(source := str(report.get("source", ""))) and not Path(source).exists():
        metadata |= {"base_model": source.partition("@")[0].partition(":")[0], "base_model_relation": "quantized"}
    header = [f"{name}: {value}" for name, value in metadata.items()]
    lines = ["---", *header, "tags:", "- mlx", "- mlxlm", "---", "", f"# {id.partition('/')[2]}"]
    lines += [*_facts(path), *_usage(path, id)]
    if report:
        lines += _quantization(report, has_plot=(path / QUANTIZATION_PLOT).is_file())
    if path.is_dir() and is_run_folder(path):
        lines += _training(path)
    return "\n".join(lines) + "\n"


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


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
    other = f"llama-cli -hf {id}" if _is_gguf(path) else f'mlx_lm.generate --model {id} --prompt "Hello"'
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
