"""A decoder run one layer at a time: a model larger than memory needs room for its largest layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_submodule
from mlxlm.model import Block, Decoder
from mlxlm.model.norms import add_norm, make_norm
from mlxlm.utils.errors import CheckpointError

LAYER_PREFIX = "model.layers"

# What flows between two layers: the residual stream and what the layer before adds to it (None after the
# embedding, and where norms are on the stream), both [B, T, hidden].
HiddenState = tuple[mx.array, mx.array | None]


class LayerwiseModel:
    """The parts of a checkpoint's decoder, each made with its weights when it is asked for and kept by nobody here.

    Together they compute what the whole decoder does, to the bit: they are its own modules.
    Raises CheckpointError for an architecture that only mlx_lm has.
    """

    def __init__(self, checkpoint: Checkpoint):
        if checkpoint.config is None:
            raise CheckpointError(f"{checkpoint.path} can't be run layer by layer: {checkpoint.unsupported_reason}")
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._outside = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(f"{LAYER_PREFIX}.")}

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return self.config.num_hidden_layers

    def embed(self, tokens: mx.array) -> HiddenState:
        """tokens int `[B, T]` -> the state before the first block."""
        return next(self.embeddings([tokens]))

    def embeddings(self, batches: Iterable[mx.array]) -> Iterator[HiddenState]:
        """The states before the first block of several batches of tokens, int `[B, T]` each; the table is read once."""
        model = Decoder(self.config, layers=0).model
        load_submodule(model, self._outside, "model", self.config.quantization)
        for tokens in batches:
            residual = model.embed(tokens)
            mx.eval(residual)  # else it keeps the table
            yield residual, None

    def load_layer(self, index: int) -> Block:
        """Layer `index` with its weights: `block(stream, update, cache) -> (stream, update)`."""
        block = Block(self.config, index)
        load_submodule(block, self._tensors, f"{LAYER_PREFIX}.{index}", self.config.quantization)
        return block

    def head(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        """The function from the state after the last block to logits `[B, T, V]`; it holds the head's weights."""
        decoder = Decoder(self.config, layers=0)
        load_submodule(decoder, self._outside, "", self.config.quantization)
        return lambda residual, hidden_states: decoder.head(decoder.model.final_norm(residual, hidden_states))

    def final_norm(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        """The function from the state after the last block to what the head reads, `[B, T, hidden]`."""
        norm = None if self.config.norm_placement == "post" else make_norm(self.config)
        if norm is not None:
            load_submodule(norm, self._outside, "model.norm", self.config.quantization)
        return lambda residual, hidden_states: add_norm(norm, residual, hidden_states)[1]

    def logits(self, residual: mx.array, hidden_states: mx.array | None) -> mx.array:
        """The state after the last block -> logits `[B, T, V]`."""
        return self.head()(residual, hidden_states)

    def run(self, tokens: mx.array, on_layer: Callable[[int, HiddenState], None] | None = None) -> mx.array:
        """tokens int `[B, T]` -> logits `[B, T, V]`. `on_layer(index, state)` is told the state after each block."""
        state = self.embed(tokens)
        for index in range(self.num_layers):
            state = self.load_layer(index)(*state)
            mx.eval(state)  # before the next block is read
            if on_layer is not None:
                on_layer(index, state)
        return self.logits(*state)
