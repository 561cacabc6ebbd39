"""Multi-token prediction: a layer that predicts a model's hidden states further ahead."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_map
from mlxlm.config import ModelConfig
from mlxlm.model.block import Block
from mlxlm.model.decoder import Decoder, soft_capped
from mlxlm.model.linear import Linear, QuantizedLinear
from mlxlm.model.norms import RMSNorm

_BITS, _GROUP_SIZE = 8, 64  # of a module whose model is quantized


class MTPModule(nn.Module):
    """Predicts the hidden state after the next token: norm(layer(fc([hidden_norm(h); embedding_norm(e)]))).

    h is the model's hidden state after its final norm, or what this module has predicted; e is the embedding of the
    token that was drawn from it (DeepSeek-V3, arXiv:2412.19437, section 2.2). The layer is that of a Llama, whatever
    the model's layers are.

    Args:
        config: Sizes of the layer; the vocabulary is the model's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.embedding_norm, self.norm = (RMSNorm(size, eps) for _ in range(3))
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = [Block(config, 0)]
        self._softcap: float | None = None

    def __call__(self, hidden_states: mx.array, embeddings: mx.array, cache: Any = None) -> mx.array:
        """Predict hidden states from those before, and from the embeddings of the tokens between.

        Args:
            hidden_states: `[B, T, hidden]`, or `[T, hidden]` in a decoding step.
            embeddings: The same.
            cache: A list with the layer's cache, which is advanced by T positions.

        Returns:
            As `hidden_states`.
        """
        inputs = self.hidden_norm(hidden_states), self.embedding_norm(embeddings)
        residual, x = self.layers[0](self.fc(mx.concatenate(inputs, axis=-1)), None, cache and cache[0])
        return self.norm(residual + x)

    def bound_to(self, model: Decoder, token_ids: mx.array) -> MTPModule:
        """Return a copy for `decode`: in the dtype of a model, quantized if that is, with rows of its output matrix.

        Args:
            model: The model.
            token_ids: The tokens that are drafted, int32 `[N]`.
        """
        bound, dtype = MTPModule(self.config), model.model.embed_tokens(token_ids[:1]).dtype
        bound.update(tree_map(lambda x: x.astype(dtype), self.parameters()))
        if model.config.quantization:
            nn.quantize(bound, _GROUP_SIZE, _BITS, class_predicate=_can_quantize)
        bound.lm_head = output_rows(model, token_ids)
        bound._softcap = model.final_logit_softcap
        bound.eval()
        mx.eval(bound.parameters())
        return bound

    def decode(self, inputs: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Compute the logits `[..., N]` of the drafted tokens and the hidden states `[..., hidden]`, after `bound_to`.

        Args:
            inputs: Hidden states and embeddings, concatenated, `[B, T, 2 · hidden]`, or `[B, 2 · hidden]` in a step.
            cache: The caches of the layers; see `Decoder.decode`.
        """
        hidden_states, embeddings = mx.split(inputs, 2, axis=-1)
        hidden_states = self(hidden_states, embeddings, cache)
        return soft_capped(self.lm_head(hidden_states), self._softcap), hidden_states

    def fuse(self) -> None:
        """Fuse the projections of the layer that have the same input, for decoding steps."""
        self.layers[0].fuse()


def output_rows(model: Decoder, token_ids: mx.array) -> nn.Linear | nn.QuantizedLinear:
    """Return the part of a model's output matrix that gives the logits of these tokens, int32 `[N]`."""
    source = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    names = [name for name in ("weight", "scales", "biases", "bias") if source.get(name) is not None]
    sizes = model.config.hidden_size, token_ids.size, "bias" in names
    rows: nn.Module = Linear(*sizes)
    if "scales" in names:
        rows = QuantizedLinear(*sizes, source.group_size, source.bits, source.mode)
    rows.update({name: source[name][token_ids] for name in names})
    return rows


def _can_quantize(_name: str, module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.weight.shape[1] % _GROUP_SIZE == 0
