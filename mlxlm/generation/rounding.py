"""How far rounding can move logits: where that could change a token, one row computed alone decides."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVOptions

Margins = dict[mx.Dtype, float]

# Twice what rounding may change a logit by, so the lead that a token needs over the runner-up: many times the rounding
# difference between computing several rows at once and one, in the logits and in the keys and values left behind.
# Measured on a CPU with models of 14M to 82M parameters and up to 33 rows: 1e-5 in float32, nothing in float16 and
# bfloat16. Not measured on GPUs, which multiply float32 with 10 bits if there are several rows.
_HALF = {mx.float16: 0.1, mx.bfloat16: 0.5}
MARGINS: Margins = dict.fromkeys((mx.float32, mx.float16, mx.bfloat16), 0.002) if ON_CPU else {mx.float32: 0.1, **_HALF}
# A quantized cache rounds a difference to another step: measured 0.002 in float32, 0.01 in float16, 0.04 in bfloat16.
QUANTIZED_MARGINS: Margins = {mx.float32: 0.03 if ON_CPU else 0.1, **_HALF}


def margins_for(kv: KVOptions) -> Margins:
    """The margins with a cache of these options."""
    return QUANTIZED_MARGINS if kv.key_bits or kv.value_bits else MARGINS
