"""A model together with its tokenizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm import checkpoint, tokenizer
from mlxlm.backend import device
from mlxlm.backend.mlx import eval_arrays, mx, nn, tree_flatten, tree_unflatten
from mlxlm.checkpoint.download import find_catalog_entry
from mlxlm.checkpoint.locations import FOLDER_FORMATS, locate
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.config import ModelConfig
from mlxlm.generation.generation_config import GenerationConfig
from mlxlm.generation.options import GenerationOptions
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError

_FLOAT16_MARGIN = 16
_SAMPLE = "The answer is 42: def f(x): return [x, 2 * x]\n\nEs ist so. Il pleut. こんにちは, мир!\n"


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer and its configuration.

    Attributes:
        model: `model(tokens, cache=None) -> logits`, see the model package.
        tokenizer: The tokenizer that it was trained with.
        config: The configuration, ours or that of an mlx_lm model.
        path: Where it was loaded from.
        generation_config: Its generation_config.json.
        engines: Its engines by their settings; see `get_engine`.
    """

    model: nn.Module = field(repr=False)
    tokenizer: tokenizer.Tokenizer
    config: ModelConfig | MlxLmConfig
    path: Path
    generation_config: GenerationConfig = field(default_factory=GenerationConfig, repr=False)
    engines: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, from the configuration and the tokenizer."""
        eos = self.tokenizer.eos_token_id
        ends = self.config.eos_token_ids | (frozenset() if eos is None else {eos})
        return frozenset(id for id in ends if id < self.config.vocab_size)

    def generation_options(self, other_names: Sequence[str] = (), /, **options: Any) -> GenerationOptions:
        """`GenerationOptions.of`, with the defaults of the model's generation_config.json."""
        return GenerationOptions.of(other_names, **{**self.generation_config.options, **options})

    @property
    def weights(self) -> list[mx.array]:
        """The arrays of the model; none if it isn't an MLX module."""
        is_module = isinstance(self.model, nn.Module)
        return [array for _, array in tree_flatten(self.model.parameters())] if is_module else []

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for array in self.weights)

    @property
    def supports_batching(self) -> bool:
        """Whether several texts can be decoded together; otherwise one after another."""
        return getattr(self.model, "supports_batching", False)


def eval_weights(model: Any) -> None:
    """Evaluate the weights of a model: until then, arrays belong to the thread that made them."""
    if isinstance(model, nn.Module):
        eval_arrays(model.state)


def load(path: Path | str) -> LoadedModel:
    """Load a model and its tokenizer.

    Weights in bfloat16 become float16 on M1 and M2, which compute bfloat16 in software, if its range is enough. Models
    that mlx_lm runs keep their dtype.

    Args:
        path: See `open_checkpoint`.

    Raises:
        CheckpointError: For unreadable weights, and for a tokenizer with more tokens than the model. Fewer are normal:
            vocabularies are padded.
        ConfigError: For an invalid configuration or generation_config.json.
        TokenizerError: For an invalid tokenizer.
    """
    source = checkpoint.open_checkpoint(path)
    model, config = checkpoint.load_checkpoint(source)
    text_tokenizer = source.load_tokenizer()
    if text_tokenizer.min_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {text_tokenizer.min_vocab_size} tokens and the model {config.vocab_size}",
            "the tokenizer files that belong to these weights",
        )
    converts = device.emulates_bfloat16() and isinstance(model, Decoder)
    if converts and not convert_to_float16(model, text_tokenizer.encode(_SAMPLE)):
        model, config = checkpoint.load_checkpoint(source)
    eval_weights(model)
    return LoadedModel(model, text_tokenizer, config, Path(path), read_generation_config(source, str(path)))


def convert_to_float16(model: Decoder, tokens: Sequence[int]) -> bool:
    """Convert weights from bfloat16 to float16.

    Args:
        model: The model.
        tokens: Of a text to try the result on.

    Returns:
        Whether the weights are finite, and the residual and what is added to it at most a sixteenth of the largest
        number: other texts have larger ones. If not, the model is of no use any more.
    """
    parameters = tree_flatten(model.parameters())
    converted = [(name, x.astype(mx.float16)) for name, x in parameters if x.dtype == mx.bfloat16]
    if not converted:
        return True
    model.update(tree_unflatten(converted))
    sizes = [mx.abs(x).max() for _, x in converted]
    residual, hidden_states = model.model.embed(mx.array([tokens])), None
    for layer in model.layers:
        residual, hidden_states = layer(residual, hidden_states)
        sizes += [_FLOAT16_MARGIN * mx.abs(x).max() for x in (residual, hidden_states) if x is not None]
    return mx.isfinite(mx.stack(sizes)).all().item()


def read_generation_config(source: checkpoint.AnyCheckpoint, name: str) -> GenerationConfig:
    """Read the generation_config.json of a model folder; of a single file, what the catalog says of the model `name`.

    Raises:
        ConfigError: The file is invalid.
    """
    if source.format in FOLDER_FORMATS:
        return GenerationConfig.read(locate(source.path).root)
    entry = find_catalog_entry(name)
    return GenerationConfig.parse(entry.generation_config, name) if entry else GenerationConfig()
