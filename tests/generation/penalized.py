"""Logits after penalties, for one text."""

import numpy as np
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.generation.penalties import PenaltyState, apply_penalties

V = 12


def penalized(options, prompt, generated, logits, breakers=None):
    """The logits `[V]` after bias and penalties, for the token after `prompt` and `generated`."""
    state = PenaltyState.from_prompt(options, prompt, len(logits), breakers)
    for token in generated:
        state = state.with_tokens(mx.array([token]), breakers)
    bias = mx.array(list(options.logit_bias)), mx.array(list(options.logit_bias.values()), mx.float32)
    return np.array(apply_penalties(mx.array(logits)[None], options, state, bias if options.logit_bias else None))[0]


few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
