"""A naive generation loop to compare with, a prompt, and small models of mlx_lm."""

import pytest

from mlxlm.backend.mlx import mx

PROMPT = [5, 9, 200, 17, 33, 33, 90, 41, 7, 123, 64]


def greedy(logits):
    return mx.argmax(logits, axis=-1)


def naive(model, prompt, n):
    """Greedy tokens, each from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(model(mx.array([ids]))[0, -1].argmax().item())
    return ids[len(prompt) :]


def mlx_lm_model(kind, **settings):
    """A small model of mlx_lm with random weights."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    mx.random.seed(1)
    model_class, arguments = utils._get_classes({"model_type": kind})
    return model_class(arguments.from_dict({"model_type": kind} | sizes | heads | settings))


STATE_SPACE = {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
