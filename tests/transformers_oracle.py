"""Small random models of transformers, and their logits. Needs PyTorch and transformers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # for tiny matrices, threads only cost time


def make_oracle(model_type: str, sizes: dict[str, Any], vocabulary: int, attention=None, with_images=False):
    """A model of transformers in which every parameter matters: no norm is 1, no bias 0.

    `with_images`: The whole model, where transformers also has its language model alone.
    """
    tokens = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(model_type, **tokens, **copy.deepcopy(sizes))  # which it changes
    is_text = type(config) in transformers.AutoModelForCausalLM._model_mapping and not with_images
    kind = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    model = kind.from_config(config, attn_implementation=attention).eval().float()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        own = ("e_score_correction_bias", "expert_bias", "layer_scalar")
        buffers = [value for name, value in model.named_buffers() if name.endswith(own)]
        for parameter in [*model.parameters(), *buffers]:
            centre = 0.7 if parameter.ndim == 1 else 0.0
            values = rng.normal(centre, 0.25, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values))
    return model


def logits_of(oracle, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return oracle(torch.from_numpy(tokens), use_cache=False).logits.numpy()
