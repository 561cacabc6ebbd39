"""Any checkpoint into a quantized model folder, with a report of what that costs."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxlm.backend.mlx import limit_buffer_cache
from mlxlm.checkpoint.mlx_lm import unconvertible_hint
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.tokenizer_files import check_tokenizer
from mlxlm.quantize.job import BitTarget, Progress, QuantizationJob
from mlxlm.quantize.plot import plot_quantization
from mlxlm.quantize.quantization_plan import Format
from mlxlm.quantize.report import QuantizationReport
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.files import atomic_new_folder, check_not_exists
from mlxlm.utils.json_files import write_json

REPORT_FILE, PLOT_FILE = "quantization.json", "quantization.png"
_SCRATCH = ".scratch"


def quantize(
    source: Path | str,
    out: Path | str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    recipe: str | None = None,
    method: str = "rtn",
    calibration_text: Path | str | None = None,
    eval_text: Path | str | None = None,
    max_size: int | None = None,
    target_bpw: float | None = None,
    max_kl: float | None = None,
    evaluate: bool = True,
    verify: bool = True,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write `source` (whatever `open_checkpoint` opens, not quantized by MLX) to the new folder `out`, for mlxlm and
    mlx_lm.

    bits, group_size, mode: of all matrices, by default 4, 64 and affine; rows that the group size doesn't divide get
    the largest size below it that does, or stay in 16 bits. recipe: one of `plan.RECIPES` instead of bits.
    budget (bytes of the files), bits_per_weight (of all weights) or max_kl (nats per token, on the evaluation text):
    bits per matrix by a search, see `search`. method: "round" as MLX does, to the bit what mlx_lm.convert writes of
    a 16-bit model (of a float32 one it keeps float32 scales, here they have 16 bits); "gptq" or "awq" calibrate.
    calibration, evaluation: text files; what takes their place, see `text`. measure: whether to compare the result with
    the source, on the evaluation text. verify: whether to check what was written, see `check`.

    Tensors stream from disk to disk: rounding holds one matrix at a time, calibration one block or table in float32,
    the moments of its inputs, and the hidden states, at most a gigabyte of which is in memory. The report is also
    written into the folder, with a picture. progress(phase, done, total).
    Raises ConfigError for settings that can't work, for settings without an effect, and for a goal that can't be
    reached, naming the nearest that can; CheckpointError for an `out` that exists and for weights that can't be
    quantized; DataError for texts that are too short. Nothing is left then.
    """
    out = Path(out)
    _check_name(out)
    if bits is not None and (recipe, max_size, target_bpw, max_kl) != (None,) * 4:
        raise ConfigError("bits have no effect where a recipe or a search decides them", "leaving them out")
    goal = BitTarget(Format.of(mode, bits, group_size), recipe, max_size, target_bpw, max_kl)
    goal.check()
    check_not_exists(out, CheckpointError, "another name for the output")
    checkpoint = open_checkpoint(source)
    if checkpoint.config is None:
        problem = f"{source} can't be quantized: mlxlm's decoder has no {checkpoint.unsupported_reason}"
        raise CheckpointError(problem, unconvertible_hint(checkpoint))
    if checkpoint.config.quantization:
        raise CheckpointError(f"{source} is quantized already", "the unquantized model it was made from")
    check_tokenizer(checkpoint)  # before the weights are written
    job = QuantizationJob(checkpoint, goal, method, evaluate, verify, progress or (lambda phase, done, total: None))
    job.read_texts(calibration_text, eval_text)
    with limit_buffer_cache(), atomic_new_folder(out) as folder:
        scratch = folder / _SCRATCH
        scratch.mkdir()
        plan, made = job.make(scratch)
        warnings = job.write(folder, plan, made)
        shutil.rmtree(scratch)
        report = job.report(str(source), out, folder, plan, made, warnings)
        write_json(folder / REPORT_FILE, report.to_dict())
        plot_quantization(report, folder / PLOT_FILE)
    return report


def _check_name(out: Path) -> None:
    """Raises ConfigError for the name of a file: other programs would look for one."""
    suffix = out.suffix.lower()
    if suffix == ".gguf":
        raise ConfigError(
            f"quantize writes a folder, not {out.name}", f"mlxlm convert SOURCE --out {out} --outtype q4_0"
        )
    if suffix in (".bin", ".safetensors", ".npz", ".pt", ".pth", ".json"):
        raise ConfigError(f"quantize writes a folder, not {out.name}", f"{out.with_suffix('')}, for a folder")
