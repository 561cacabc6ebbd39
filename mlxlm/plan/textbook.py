"""The arithmetic of transformers as the literature states it: short formulas, for 16-bit numbers and the full square
of scores. What the planner says of a real configuration is counted; these stand beside it.

Letters are those of the papers: b batch, s sequence length, h hidden size, l layers, a heads, V vocabulary,
Φ parameters.
"""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Chinchilla", table 3)


def dense_parameters(h: int, layers: int) -> int:
    """12·l·h²: the matrices of a decoder whose feed-forward is 4 hidden sizes wide (Kaplan et al. 2020, 2.1)."""
    return 12 * layers * h * h


def inference_bytes(parameters: int) -> int:
    """2Φ: 16-bit weights."""
    return 2 * parameters


def training_bytes(parameters: int) -> dict[str, int]:
    """20Φ bytes, by what they hold: 16-bit weights and gradients, both in 32 bits as well, and AdamW's two averages."""
    each = {"weights": 2, "gradients": 2, "master weights": 4, "master gradients": 4, "AdamW's averages": 8}
    return {name: size * parameters for name, size in each.items()}


def forward_flops(b: int, s: int, h: int, layers: int, vocab_size: int) -> int:
    """l·(24bsh² + 4bs²h) + 2bshV (Narayanan et al. 2021, "Megatron-LM", appendix)."""
    return layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * vocab_size


def training_flops(parameters: float, tokens: float, grad_checkpoint: bool = False) -> float:
    """6 for each parameter and token: 2 forward, 4 backward; 8 where the forward pass is computed again."""
    return (8 if grad_checkpoint else 6) * parameters * tokens


def activation_bytes(b: int, s: int, h: int, a: int, layers: int) -> int:
    """l·(34bsh + 5bs²a), 16-bit, without recomputation (Korthikanti et al. 2022, equation 2)."""
    return layers * (34 * b * s * h + 5 * b * s * s * a)


def cache_bytes(b: int, h: int, layers: int, prompt: int, generated: int) -> int:
    """4·l·b·h·(s + n): 16-bit keys and values of multi-head attention, for s tokens read and n generated."""
    return 4 * layers * b * h * (prompt + generated)


def compute_optimal_tokens(parameters: float) -> float:
    """20 tokens a parameter (Hoffmann et al. 2022)."""
    return TOKENS_PER_PARAMETER * parameters
