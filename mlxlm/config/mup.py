"""µP: factors of initialization and learning rate under which the best learning rate is the same for all sizes.

Width: Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer".
Depth: Dey et al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers" (alpha = 1).

µP multiplies the logits by 1 / width, attention scores by 1 / head_dim and what a layer adds to the residual by 1 /
depth. Here these multipliers are part of the weights that they follow: an update of AdamW, Lion or Muon doesn't depend
on the size of the gradient, so a weight with a multiplier m trains as one whose initialization and learning rate are
multiplied by m (Yang et al. 2022, lemma J.1). Thus the model needs no field that Llama lacks.
"""

from __future__ import annotations

from mlxlm.config.components import RECURRENT
from mlxlm.config.model_config import ModelConfig
from mlxlm.utils.errors import ConfigError

PARAMETRIZATIONS = ("standard", "mup")
MUP_OPTIMIZERS = ("adamw", "muon", "lion")  # Adafactor's updates depend on the size of the weights
# The model for which both parametrizations are the same. It is small: in larger ones, embeddings then learn faster than
# matrices.
_HIDDEN_SIZE, _LAYERS, _HEAD_DIM = 32, 2, 16


def mup_factors(config: ModelConfig, name: str, ndim: int, muon: bool = False) -> tuple[float, float]:
    """Return the factors of the standard initialization and of the learning rate of a parameter.

    Args:
        config: The model.
        name: The parameter's name, as in Hugging Face's Llama.
        ndim: Its dimensions.
        muon: Whether Muon updates it, if it is a matrix of a layer. An orthogonal update of a matrix has a norm that
            grows with the square root of the width, not with the width.
    """
    width, depth = config.hidden_size / _HIDDEN_SIZE, config.num_hidden_layers / _LAYERS
    head = (_HEAD_DIM / config.head_dim) ** 0.5
    if ".layers." not in name:
        if name.startswith("model.norm."):  # has the multiplier of the logits
            return 1 / width, 1 / width
        return (width**0.5 if ndim > 1 else 1.0), 1.0  # embedding and head: the same at every width
    matrix = (1 / width**0.5 if muon else 1 / width) if ndim > 1 else 1.0
    module = name.split(".")[-2]
    if module in ("o_proj", "down_proj"):  # the standard initialization has 1 / sqrt(depth) already
        return depth**-0.5, matrix / depth
    if module == ("q_norm" if config.qk_norm else "q_proj"):  # has the multiplier of attention scores
        return head, head * matrix
    return 1.0, matrix


def check_mup(config: ModelConfig, optimizer: str) -> None:
    """Raise ConfigError if µP has no rule for a part of the model, or for the optimizer."""
    if optimizer not in MUP_OPTIMIZERS:
        raise ConfigError(f"µP has no learning rates for {optimizer}", f"`optimizer={MUP_OPTIMIZERS[0]}`")
    rules = {
        "norm_placement": config.norm_placement == "pre",
        "norm": config.norm in ("rms", "layer", "layer_no_bias"),
        "experts": config.num_experts is None,
        "layer_types": not set(config.layer_types or ()) & RECURRENT.keys(),
        "attention": config.kv_lora_rank is None,
        "qk_norm": config.qk_norm != "l2",
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input is None,
        "embedding_multiplier": config.embedding_multiplier == 1,
    }
    if missing := [name for name, has_rule in rules.items() if not has_rule]:
        raise ConfigError(f"µP has no rule for this model's {' and '.join(missing)}", "`parametrization=standard`")
