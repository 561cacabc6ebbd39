"""A run, or any model of ours, as a self-contained folder: mlx_lm opens it, and at 16 bits transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxlm._mlx import mx, nn, tree_flatten
from mlxlm.checkpoint import load_model, locate, save_weights
from mlxlm.checkpoint.layout import is_run
from mlxlm.checkpoint.quantize import GROUP_SIZES, Quantized, quantize_weights
from mlxlm.config import ModelConfig
from mlxlm.data import TokenDataset
from mlxlm.errors import CheckpointError, ConfigError
from mlxlm.evaluate import evaluate
from mlxlm.files import check_free, new_folder, write_json
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.train import Run

BITS = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class ExportReport:
    """What was written and what it cost.

    `bits_per_byte_before` and `_after` are on the run's validation text, None where there is none.
    `regrouped` and `skipped` name the layers that the group size didn't divide: the size they got, or
    the width that no size divides (left in 16 bits).
    """

    path: str
    bits: int
    group_size: int
    parameters: int
    bits_per_weight: float
    bytes: int
    bits_per_byte_before: float | None
    bits_per_byte_after: float | None
    regrouped: dict[str, int]
    skipped: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(source: Path | str, out: Path | str, bits: int = 4, group_size: int = 64) -> ExportReport:
    """Write the model in `source` (a run's best checkpoint, or a model folder) to the new folder `out`.

    16 bits are float16: weights of models trained here are far below its largest value (checked), and it
    has three more bits of precision than bfloat16. Fewer bits are MLX's affine quantization.

    Raises CheckpointError if `out` exists, if the weights are not finite, or if the source is quantized, and
    DataError if a run's validation text is gone: its report would be empty.
    """
    source, out = Path(source), Path(out)
    if bits not in BITS:
        raise ConfigError(f"{bits} bits is not a format", f"one of {', '.join(map(str, BITS))}")
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"groups of {group_size} are not a format", f"one of {', '.join(map(str, GROUP_SIZES))}")
    check_free(out, CheckpointError, "another name for the output")
    model, config = load_model(source)
    if not isinstance(config, ModelConfig):
        raise CheckpointError(f"{source} is a {config.model_type} model", "mlx_lm.convert for it")
    if config.quantization:
        raise CheckpointError(f"{source} is quantized already", "the unquantized model it was made from")
    _check_finite(model, source)
    root = locate(source).root
    tokenizer = load_tokenizer(root)
    if bits == 16:
        weights = {name: w.astype(mx.float16) for name, w in tree_flatten(model.parameters())}
        written = Quantized(weights, {}, {}, {})
    else:
        written = quantize_weights(model, bits, group_size)
    bits_per_byte = _validation(root)
    before = bits_per_byte and bits_per_byte(model)
    with new_folder(out) as folder:
        write_json(folder / "config.json", _config_json(config, written))
        tokenizer.save(folder)
        save_weights(folder, written.weights)
        after = bits_per_byte and bits_per_byte(load_model(folder)[0])
    return ExportReport(
        path=str(out),
        bits=bits,
        group_size=group_size,
        parameters=config.parameter_count(),
        bits_per_weight=8 * sum(w.nbytes for w in written.weights.values()) / config.parameter_count(),
        bytes=sum(f.stat().st_size for f in out.iterdir()),
        bits_per_byte_before=before,
        bits_per_byte_after=after,
        regrouped=written.regrouped,
        skipped=written.skipped,
    )


def _config_json(config: ModelConfig, written: Quantized) -> dict[str, Any]:
    values = {**config.to_dict(), "torch_dtype": "float16"}
    if written.plan:
        # mlx_lm reads "quantization"; Hugging Face's tools look for "quantization_config".
        values |= {"quantization": written.plan, "quantization_config": written.plan}
    return values


def _check_finite(model, source: Path) -> None:
    for name, weight in tree_flatten(model.parameters()):
        largest = mx.abs(weight).max().item()
        if not largest < mx.finfo(mx.float16).max:
            raise CheckpointError(f"{source}: {name} has values that 16 bits can't hold (up to {largest})")


def _validation(root: Path) -> Callable[[nn.Module], float] | None:
    """Bits per byte of a model on the validation text of the run `root`; None where it isn't a run."""
    if not is_run(root):
        return None
    run = Run.open(root)
    run.check_data()
    data, settings = TokenDataset.open(run.data, "validation"), run.settings

    def bits_per_byte(model: nn.Module) -> float:
        return evaluate(
            model, data, settings.sequence_length, settings.batch_size, settings.eval_tokens
        ).bits_per_byte

    return bits_per_byte
