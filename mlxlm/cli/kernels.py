"""`mlxlm kernels`: show which implementation each operation of a model uses on this machine, and benchmark them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import mlxlm.plan as planner
from mlxlm import checkpoint
from mlxlm.checkpoint.download import find
from mlxlm.cli import render
from mlxlm.cli.options import DTYPES, MODEL, json_option
from mlxlm.utils.errors import MlxlmError, PlatformError
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.kernels.bench import Measurement
    from mlxlm.kernels.dispatch import Case, Operation

_DEFAULT = "15m"
_MODEL = click.argument("model", type=MODEL, default=_DEFAULT)
_DTYPE_HELP = "Dtype of generation.  [default: that of MODEL's weights; float32 on a CPU]"
_DTYPE = click.option("--dtype", type=click.Choice(DTYPES), help=_DTYPE_HELP)
_REPEATS: dict[str, Any] = {"type": click.IntRange(1), "metavar": "N", "default": 7, "show_default": True}


@click.group()
def kernels() -> None:
    """Show or benchmark the implementations of norms and attention on this machine.

    MODEL is a preset (default: 15m), a model folder, a name of mlxlm models, or a hub id. The environment variable
    MLXLM_KERNELS selects one implementation wherever it exists: auto (the default), metal, mlx or blockwise.
    """


@kernels.command("list")
@_MODEL
@_DTYPE
@json_option
def list_(model: str, dtype: str | None, as_json: bool) -> None:
    """Show which implementation each operation uses.

    MODEL is a preset or a model.
    """
    from mlxlm.kernels import dispatch, measurements

    choices: list[tuple[Case, str | None, str]] = []
    for operation, case in _cases(model, dtype):
        try:
            choices.append((case, *dispatch.choose_path(operation, case)))
        except PlatformError as problem:
            choices.append((case, None, problem.message))
    if as_json:
        operations = [{"case": str(case), "path": path, "why": why} for case, path, why in choices]
        render.emit_json({"machine": measurements.device_key(), "mode": dispatch.mode(), "operations": operations})
        return
    rows = [(case.operation, case.dtype, case.label, path or "-", why) for case, path, why in choices]
    render.print_table(rows, ("operation", "dtype", "case", "path", "why"))


@kernels.command()
@_MODEL
@_DTYPE
@click.option("--repeats", **_REPEATS, help="Timings per implementation.")
@json_option
def bench(model: str, dtype: str | None, repeats: int, as_json: bool) -> None:
    """Benchmark all implementations of operations.

    MODEL is a preset or a model. From then on, the fastest implementations of its operations are used.

    A run that is resumed after this may use other implementations, whose sums round differently.
    """
    from mlxlm.kernels import measurements
    from mlxlm.kernels.bench import benchmark_all

    cases = _cases(model, dtype)
    measured: list[Measurement] = []
    error = None
    with render.phases_progress() as progress:
        try:
            for measurement in benchmark_all(cases, repeats):
                measured.append(measurement)
                progress("measuring", len(measured), len(cases))
        except MlxlmError as problem:  # the results can't be saved
            error = problem
    if as_json:
        results = [m.to_dict() for m in measured]
        render.emit_json({"machine": measurements.device_key(), "repeats": repeats, "cases": results})
    else:
        header = ("operation", "case", "path", "ms", "range", "error", "peak memory", "")
        render.print_table([row for m in measured for row in _rows(m)], header)
        for line in sorted({f"{path}: {reason}" for m in measured for path, reason in m.skipped.items()}):
            render.say(f"not measured: {line}")
    if error:
        raise error
    if not as_json:
        render.say(f"saved in {measurements.cache_path()} for this device, MLX version and version of the kernels")


def _cases(model: str, dtype: str | None) -> list[tuple[Operation, Case]]:
    """The operations of MODEL on this device, in generation and in training."""
    from mlxlm.plan.kernel_cases import cases_of
    from mlxlm.train.start import DEVICE_DTYPE

    return cases_of(planner.find_config(model), dtype or _stored_dtype(model) or DEVICE_DTYPE, DEVICE_DTYPE)


def _stored_dtype(model: str) -> str | None:
    """The dtype that a model folder generates in; None without weights, and on a CPU, which uses float32."""
    from mlxlm.backend.mlx import ON_CPU, mx
    from mlxlm.kernels.dispatch import DTYPE_NAMES

    path = find(model)
    if ON_CPU or path is None or not any(path.glob("*.safetensors")):
        return None
    loaded, _ = checkpoint.load_checkpoint(checkpoint.open_checkpoint(model))
    return DTYPE_NAMES[loaded.model.embed(mx.zeros((1, 1), mx.int32)).dtype]


def _rows(m: Measurement) -> Iterator[tuple[str, ...]]:
    for path, timing in m.timings.items():
        first, last = min(timing.seconds), max(timing.seconds)
        yield (
            f"{m.case.operation} {m.case.dtype}",
            m.case.label,
            path,
            f"{1e3 * timing.median:.3f}",
            f"{1e3 * first:.3f} to {1e3 * last:.3f}",
            f"{timing.error:.1e}",
            human_bytes(timing.peak_bytes),
            "fastest" if path == m.fastest else "",
        )
