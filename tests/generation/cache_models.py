"""Tiny models by the kinds of their caches: decoders with recurrent layers, and models of mlx_lm's classes."""

from dataclasses import replace
from importlib.util import find_spec

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.checkpoint.mlx_lm.model import build_model
from mlxlm.generation import LoadedModel
from tests.generation.recording_model import RecordingModel

RECURRENT = {
    "short convolutions": {"layer_types": ("conv", "full_attention", "conv"), "conv_L_cache": 4},
    "gated delta rule": {
        "layer_types": ("linear_attention", "full_attention", "linear_attention"), "attn_output_gate": True,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    },
    "Mamba 2": {
        "layer_types": ("mamba", "full_attention", "mamba"), "positions": "none",
        "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_d_state": 12,
    },
}  # fmt: skip
DECODERS = {
    **RECURRENT, "all tokens": {},
    "windows": {"sliding_window": 9, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")},
}  # fmt: skip
BASE = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 600,
    "tie_word_embeddings": True,
}  # fmt: skip
MLX_LM_MODELS = {
    "sliding windows": ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "recurrent": (
        "mamba", {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
    ),
    "recurrent and full": (
        "olmo_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"], "attention_bias": False,
            "linear_allow_neg_eigval": True, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        },
    ),
    "two in a layer": (
        "falcon_h1",
        {
            "mamba_d_conv": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_groups": 1,
            "mamba_n_heads": 4, "mamba_expand": 1, "mamba_chunk_size": 8, "mamba_norm_before_gate": False,
            "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mamba_conv_bias": True,
        },
    ),
    # It needs its position in Python, and can't batch.
    "positions as numbers": (
        "gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 600, "layer_norm_epsilon": 1e-5}
    ),
}  # fmt: skip
POSITIONS = "positions as numbers"
WITH_BATCHES = [kind for kind in MLX_LM_MODELS if kind != POSITIONS]
KINDS = [*DECODERS, *(WITH_BATCHES if find_spec("mlx_lm") else ())]


def build(kind, values):
    mx.random.seed(3)
    model, _ = build_model({"model_type": kind, **BASE, **values})
    mx.eval(model.parameters())
    return model.eval()


class Recorded:
    """A model of mlx_lm's classes that notes the shapes of its calls, as RecordingModel does."""

    def __call__(self, inputs, cache=None, **options):
        self.calls.append(tuple(inputs.shape))
        return super().__call__(inputs, cache=cache, **options)


class Models(dict):
    """A `LoadedModel` for each kind, built when it is first needed."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def __missing__(self, kind):
        self[kind] = self._decoder(**DECODERS[kind]) if kind in DECODERS else self._of_mlx_lm(*MLX_LM_MODELS[kind])
        return self[kind]

    def _decoder(self, **changes):
        sizes = {"num_hidden_layers": 3, "head_dim": 32, "max_position_embeddings": 600}
        model = RecordingModel(self.lm.config.with_changes(**sizes, **changes))
        model.init_weights(seed=3)
        model.lm_head.weight = model.lm_head.weight * 20
        model.eval()
        return replace(self.lm, model=model, config=model.config)

    def _of_mlx_lm(self, model_type, values):
        model = build(model_type, values)
        model.__class__ = type("Recorded", (Recorded, type(model)), {"calls": []})
        return LoadedModel(model, self.lm.tokenizer, MlxLmConfig(model_type, 300, 600, frozenset()), self.lm.path)
