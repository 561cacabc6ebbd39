"""Logits after penalties, for one text."""

import numpy as np
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.generation.penalties import PenaltyState, apply_penalties, penalty_numbers

V = 12


def penalized(options, prompt, generated, logits, breakers=None):
    """The logits `[V]` after bias and penalties, for the token after `prompt` and `generated`."""
    state = PenaltyState.from_prompt(options, prompt, len(logits), breakers)
    for token in generated:
        state = state.with_tokens(mx.array([token]), breakers)
    bias = np.zeros(len(logits), np.float32)
    bias[list(options.logit_bias)] = list(options.logit_bias.values())
    return np.array(apply_penalties(mx.array(logits)[None], penalty_numbers(options), state, mx.array(bias)))[0]


few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)
