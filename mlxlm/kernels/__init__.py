"""Operations with several implementations, and the dispatch between them.

Norms, attention and quantiles have up to three implementations (see `dispatch`): MLX's operations, mlxlm's Metal
kernels, and blockwise computation with linear memory. On MLX's CPU backend, whose `exp` is scalar (12 ns per element),
softmax and activations use a vectorised `exp` instead.
"""

from mlxlm.kernels.activations import clamped_swiglu, gelu, gelu_tanh, swiglu, with_fused_gradients
from mlxlm.kernels.attention import attention
from mlxlm.kernels.cross_entropy import cross_entropy, linear_cross_entropy, log_softmax
from mlxlm.kernels.dispatch import use_kernels
from mlxlm.kernels.distillation import Distillation, LinearLogits, linear_distillation_loss
from mlxlm.kernels.latent_attention import latent_attention
from mlxlm.kernels.masked_attention import masked_attention, prepare_masked_attention
from mlxlm.kernels.qk_norm_rope import RoPE, qk_norm_rope
from mlxlm.kernels.quantile import kth_smallest, weighted_quantile
from mlxlm.kernels.quantized_kv import QuantizedKV
from mlxlm.kernels.rms_norm import add_rms_norm, rms_norm

__all__ = [
    "Distillation",
    "LinearLogits",
    "QuantizedKV",
    "RoPE",
    "add_rms_norm",
    "attention",
    "clamped_swiglu",
    "cross_entropy",
    "gelu",
    "gelu_tanh",
    "kth_smallest",
    "latent_attention",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "log_softmax",
    "masked_attention",
    "prepare_masked_attention",
    "qk_norm_rope",
    "rms_norm",
    "swiglu",
    "use_kernels",
    "weighted_quantile",
    "with_fused_gradients",
]
