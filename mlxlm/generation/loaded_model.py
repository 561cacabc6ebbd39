"""A model together with its tokenizer, as generation and chat take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mlxlm import checkpoint, tokenizer
from mlxlm.backend.mlx import nn
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.config import ModelConfig
from mlxlm.utils.errors import CheckpointError


@dataclass(frozen=True)
class LoadedModel:
    """`model(tokens, cache=None) -> logits`, the tokenizer it was trained with, and its configuration."""

    model: nn.Module = field(repr=False)
    tokenizer: tokenizer.Tokenizer
    config: ModelConfig | MlxLmConfig
    path: Path

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text: the configuration's and the tokenizer's."""
        eos = self.tokenizer.eos_id
        ends = self.config.eos_ids | (frozenset() if eos is None else {eos})
        return frozenset(id for id in ends if id < self.config.vocab_size)

    @property
    def supports_batching(self) -> bool:
        """Whether several texts can grow side by side; else each waits for the one before it."""
        return getattr(self.model, "supports_batching", False)


def load(path: Path | str) -> LoadedModel:
    """Load a model; `path`: see `open_checkpoint`.

    Raises CheckpointError, ConfigError or TokenizerError naming the file, and CheckpointError for a
    tokenizer with more tokens than the model. Fewer are normal: vocabularies are padded.
    """
    source = checkpoint.open_checkpoint(path)
    model, config = checkpoint.load_checkpoint(source)
    tokens = source.load_tokenizer()
    if tokens.min_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokens.min_vocab_size} tokens and the model {config.vocab_size}",
            "the tokenizer files that belong to these weights",
        )
    return LoadedModel(model, tokens, config, Path(path))
