"""How far rounding can move logits: where that could change a token, one row computed alone decides."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU
from mlxlm.cache import KVOptions


def margin_for(kv: KVOptions) -> float | None:
    """Twice what rounding may change a logit by, so the lead that a token needs over the runner-up. None on a GPU.

    On a CPU it is many times the difference between several rows computed at once and one, in the logits and in the
    keys and values left behind. Measured in float32 with models of 14M to 82M parameters and up to 33 rows: 1e-5, and
    with a quantized cache, which rounds a difference to another step, 0.002.

    On a GPU no margin helps. Its products sum in another order for several rows, and are rounded to half precision. In
    simulated bfloat16 (`benchmarks/rounding.py`) this changes leads of SmolLM2-135M by up to 0.5, with 4-bit weights 6,
    and 1 to 3% of the tokens. Deciding each by a pass over its row alone leaves as many: its keys and values are those
    of the batch.
    """
    if not ON_CPU:
        return None
    return 0.03 if kv.key_bits or kv.value_bits else 0.002
