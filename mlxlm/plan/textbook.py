"""Short formulas of the literature for the cost of transformers, in 16 bits and without the saving of a causal mask.

The planner counts the operations and bytes of the actual configuration; these formulas are shown for comparison. The
letters are those of the papers: b batch size, s sequence length, h hidden size, l layers, a heads, V vocabulary size,
Φ parameters.
"""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Chinchilla", table 3)


def dense_parameters(h: int, layers: int) -> int:
    """12·l·h²: the matrices of a decoder with an intermediate size of 4h (Kaplan et al. 2020, section 2.1)."""
    return 12 * layers * h * h


def inference_bytes(parameters: int) -> int:
    """2Φ: 16-bit weights."""
    return 2 * parameters


def training_bytes(parameters: int) -> dict[str, int]:
    """20Φ bytes: weights and gradients in 16 and in 32 bits, and AdamW's two moments."""
    bytes_per_parameter = {
        "weights": 2,
        "gradients": 2,
        "master weights": 4,
        "master gradients": 4,
        "AdamW's moments": 8,
    }
    return {name: size * parameters for name, size in bytes_per_parameter.items()}


def forward_flops(b: int, s: int, h: int, layers: int, vocab_size: int) -> int:
    """l·(24bsh² + 4bs²h) + 2bshV (Narayanan et al. 2021, "Megatron-LM", appendix)."""
    return layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * vocab_size


def training_flops(parameters: float, tokens: float, grad_checkpoint: bool = False) -> float:
    """6 per parameter and token: 2 forward, 4 backward. 8 with gradient checkpointing."""
    return (8 if grad_checkpoint else 6) * parameters * tokens


def activation_bytes(b: int, s: int, h: int, a: int, layers: int) -> int:
    """l·(34bsh + 5bs²a), 16-bit, without recomputation (Korthikanti et al. 2022, equation 2)."""
    return layers * (34 * b * s * h + 5 * b * s * s * a)


def cache_bytes(b: int, h: int, layers: int, prompt: int, generated: int) -> int:
    """4·l·b·h·(s + n): 16-bit keys and values of multi-head attention, for s prompt tokens and n generated ones."""
    return 4 * layers * b * h * (prompt + generated)


def compute_optimal_tokens(parameters: float) -> float:
    """20 tokens per parameter (Hoffmann et al. 2022)."""
    return TOKENS_PER_PARAMETER * parameters
