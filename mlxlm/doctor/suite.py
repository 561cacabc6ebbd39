"""All checks of `mlxlm doctor --full`, in their order."""

from __future__ import annotations

from pathlib import Path

from mlxlm.backend.mlx import ON_CPU
from mlxlm.doctor.check import Check
from mlxlm.doctor.decoding_checks import DecodingChecks, memory_checks
from mlxlm.doctor.kernel_checks import benchmark_checks, kernel_checks
from mlxlm.doctor.sizes import CPU, GPU, Sizes
from mlxlm.doctor.training_checks import TrainingChecks


def full_suite(folder: Path, sizes: Sizes | None = None) -> list[Check]:
    """Return the checks. Runs are written to `folder`; by default the sizes are those for this device."""
    sizes = sizes or (CPU if ON_CPU else GPU)
    return [
        *memory_checks(sizes),
        *DecodingChecks(sizes),
        *TrainingChecks(sizes, folder),
        *kernel_checks(sizes),
        *benchmark_checks(sizes),
    ]
