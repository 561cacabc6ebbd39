"""Quantize models by rounding, GPTQ or AWQ, and report what it costs.

Example::

    report = quantize("runs/stories", "stories-4bit", bits=4, method="gptq")
    print(report.bits_per_weight, report.metrics.kl)
"""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.config.quantization import BITS, GROUP_SIZES, RECIPES, Format
    from mlxlm.quantize.importance import importance_weights
    from mlxlm.quantize.pipeline import quantize
    from mlxlm.quantize.report import QuantizationMetrics, QuantizationReport
    from mlxlm.quantize.settings import METHODS, QuantizationSettings

__all__ = [
    "BITS",
    "GROUP_SIZES",
    "METHODS",
    "RECIPES",
    "Format",
    "QuantizationMetrics",
    "QuantizationReport",
    "QuantizationSettings",
    "importance_weights",
    "quantize",
]
__getattr__ = lazy_exports(__name__)
