"""Run a decoder one layer at a time: a model larger than memory only needs room for its largest layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_submodule
from mlxlm.model import Block, Decoder
from mlxlm.model.norms import add_norm, make_norm

LAYER_PREFIX = "model.layers"

# State between two layers: the residual stream and the previous layer's output, not yet added to it (None after the
# embedding, and with norms on the residual stream), both [B, T, hidden].
HiddenState = tuple[mx.array, mx.array | None]


class LayerwiseModel:
    """The parts of a checkpoint's decoder, each loaded when it is used.

    They are the decoder's own modules and compute the same values, bit for bit. Nothing is cached.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._top_tensors = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(f"{LAYER_PREFIX}.")}

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.config.num_hidden_layers

    def embeddings(self, batches: Iterable[mx.array]) -> Iterator[HiddenState]:
        """Yield the state before the first layer of each batch of tokens, int `[B, T]`; the embedding is read once."""
        model = Decoder(self.config, layers=0).model
        load_submodule(model, self._top_tensors, "model", self.config.quantization)
        for tokens in batches:
            residual = model.embed(tokens)
            mx.eval(residual)  # otherwise its graph keeps the embedding in memory
            yield residual, None

    def load_layer(self, index: int) -> Block:
        """Load layer `index`: `block(residual, hidden_states, cache) -> (residual, hidden_states)`."""
        block = Block(self.config, index)
        load_submodule(block, self._tensors, f"{LAYER_PREFIX}.{index}", self.config.quantization)
        return block

    def head(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        """Load the head: a function from the state after the last layer to logits `[B, T, V]`."""
        decoder = Decoder(self.config, layers=0)
        load_submodule(decoder, self._top_tensors, "", self.config.quantization)
        return lambda residual, hidden_states: decoder.head(decoder.model.final_norm(residual, hidden_states))

    def final_norm(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        """Load the final norm: a function from the state after the last layer to the head's input `[B, T, hidden]`."""
        norm = None if self.config.layer_norms.after_addition else make_norm(self.config)
        if norm is not None:
            load_submodule(norm, self._top_tensors, "model.norm", self.config.quantization)
        return lambda residual, hidden_states: add_norm(norm, residual, hidden_states)[1]
