"""Quantize models, plainly or calibrated on a text, and tell what it costs.

report = quantize("runs/stories", "stories-4bit", bits=4, method="gptq")
print(report.bits_per_weight, report.measured.kl)
"""

from mlxlm.quantize.calibrated_methods import METHODS
from mlxlm.quantize.model import PLOT_FILE, REPORT_FILE, quantize
from mlxlm.quantize.quantization_plan import BITS, GROUP_SIZES, RECIPES, Format
from mlxlm.quantize.report import QuantizationMetrics, QuantizationReport

__all__ = [
    "BITS",
    "GROUP_SIZES",
    "METHODS",
    "PLOT_FILE",
    "RECIPES",
    "REPORT_FILE",
    "Format",
    "QuantizationMetrics",
    "QuantizationReport",
    "quantize",
]
