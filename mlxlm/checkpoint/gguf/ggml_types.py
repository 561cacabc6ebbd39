"""ggml's types of tensors, as GGUF files number them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Type:
    """ggml's name for a type, how many weights of a row share a block, and the bytes of one block."""

    name: str
    block: int
    bytes: int


# By the format's number, as in ggml.h and ggml-common.h. Each one but the first three goes through `gguf.quants`.
TYPES = {
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    30: Type("BF16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136),
    29: Type("IQ1_M", 256, 56),
    34: Type("TQ1_0", 256, 54),
    35: Type("TQ2_0", 256, 66),
    39: Type("MXFP4", 32, 17),
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
