"""Quantize models, plainly or calibrated on a text, and tell what it costs.

report = quantize("runs/stories", "stories-4bit", bits=4, method="gptq")
print(report.bits_per_weight, report.measured.kl)
"""

from mlxlm.quantize.calibrated_methods import METHODS
from mlxlm.quantize.model import PICTURE, REPORT, quantize
from mlxlm.quantize.quantization_plan import BITS, GROUP_SIZES, RECIPES, Format
from mlxlm.quantize.report import Measured, Report

__all__ = [
    "BITS",
    "GROUP_SIZES",
    "METHODS",
    "PICTURE",
    "RECIPES",
    "REPORT",
    "Format",
    "Measured",
    "Report",
    "quantize",
]
