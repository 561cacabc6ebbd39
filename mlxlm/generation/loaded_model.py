"""A model with its tokenizer and its generation_config.json, loaded from a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mlxlm import checkpoint, tokenizer
from mlxlm.backend import device
from mlxlm.backend.mlx import eval_arrays, mx, nn, tree_flatten, tree_unflatten
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.cache.mlx_lm_caches import can_batch
from mlxlm.checkpoint.download import find_catalog_entry
from mlxlm.checkpoint.embedding_config import EmbeddingConfig
from mlxlm.checkpoint.locations import FOLDER_FORMATS, locate
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.checkpoint.tensor_parallel import shard_with_mlx_lm, split_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.option import declaration, options_of
from mlxlm.generation.logit_filters import FilterOptions
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.workers import ModelWorkers
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, ConfigError, GenerationError
from mlxlm.utils.json_files import read_json_object, write_json

FILE_NAME = "generation_config.json"
MAX_EXAMPLE_LENGTH = 200  # characters
_MAX_BYTES = 1 << 20
# The fields of Hugging Face's GenerationConfig that mean the same here, and that every text can use.
_FIELDS = [name for name, field in options_of(GenerationOptions).items() if declaration(field).generation_config]
_FLOAT16_MARGIN = 16
_named: dict[str, LoadedModel] = {}
_named_lock = threading.Lock()
_SAMPLE = "The answer is 42: def f(x): return [x, 2 * x]\n\nEs ist so. Il pleut. こんにちは, мир!\n"


@dataclass(frozen=True)
class GenerationConfig:
    """What a model's folder says about generating with it.

    Attributes:
        options: The fields of GenerationOptions that it sets. They are defaults: arguments override them.
        example_prompt: A message, or the beginning of a text, that shows what the model can do. This key of the file
            is mlxlm's own.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    example_prompt: str | None = None

    def write(self, folder: Path) -> None:
        """Add these values to the file in `folder`, or create it. Raise as `read` does, and CheckpointError."""
        file = folder / FILE_NAME
        values = read_json_object(file, _MAX_BYTES, ConfigError) if file.exists() else {}
        values.pop("_from_model_config", None)  # with it, transformers ignores what config.json doesn't say
        if "temperature" in self.options:
            values["do_sample"] = self.options["temperature"] > 0
        if check_example_prompt(self.example_prompt) is not None:
            values["example_prompt"] = self.example_prompt
        write_json(file, {**values, **self.options})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file in `folder`, if there is one.

        Raises:
            ConfigError: The file can't be read, or has an invalid value; the message names the file and the field.
        """
        file = folder / FILE_NAME
        return cls.parse(read_json_object(file, _MAX_BYTES, ConfigError), str(file)) if file.exists() else cls()

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Self:
        """Read the values of such a file; `source` is its name for the errors, which are those of `read`."""
        options = {name: values[name] for name in _FIELDS if values.get(name) is not None}
        if values.get("do_sample") is False:  # greedy; then transformers ignores the other options of sampling
            options = {"temperature": 0.0, **{k: v for k, v in options.items() if k not in options_of(FilterOptions)}}
        try:
            GenerationOptions(**options)
            example = check_example_prompt(values.get("example_prompt"))
        except GenerationError as error:
            raise error.prefixed(source, ConfigError) from None
        return cls(options, example)


def check_example_prompt(text: Any) -> str | None:
    """Return the example prompt of a generation_config.json.

    Raises:
        GenerationError: It is not one line of printable text, or too long.
    """
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip() or not text.isprintable() or len(text) > MAX_EXAMPLE_LENGTH:
        hint = f"one line of at most {MAX_EXAMPLE_LENGTH} printable characters"
        raise GenerationError(f"example_prompt is {text!r:.60}", hint)
    return text


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer and its configuration.

    Attributes:
        model: `model(tokens, cache=None) -> logits`, see the model package.
        tokenizer: The tokenizer that it was trained with.
        config: The configuration, ours or that of an mlx_lm model.
        path: Where it was loaded from.
        generation_config: Its generation_config.json.
        embedding: How it makes embeddings.
        workers: The processes that have the other parts of the model, on rank 0; see `mlxlm.generation.distributed`.
        engines: Its engines by their settings; see `get_engine`.
    """

    model: nn.Module = field(repr=False)
    tokenizer: tokenizer.Tokenizer
    config: ModelConfig | MlxLmConfig
    path: Path
    generation_config: GenerationConfig = field(default_factory=GenerationConfig, repr=False)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig, repr=False)
    workers: ModelWorkers | None = field(default=None, repr=False, compare=False)
    engines: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def check_whole(self, what: str) -> None:
        """Raise GenerationError if other processes have parts of the model: they take no part in `what`."""
        if self.workers is not None:
            raise GenerationError(f"a model that is split over several processes has no {what}", "one machine")

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

    @cached_property
    def supports_batching(self) -> bool:
        """Whether several texts can be decoded together; otherwise one after another."""
        if isinstance(self.config, MlxLmConfig):
            result = can_batch(self.model)
            eval_weights(self.model)  # Gemma 3n's forward pass clips its own
            return result
        return getattr(self.model, "supports_batching", False)


def eval_weights(model: Any) -> None:
    """Evaluate the weights of a model: until then, arrays belong to the thread that made them."""
    if isinstance(model, nn.Module):
        eval_arrays(model.state)


def load(path: Path | str, adapter: Path | str | None = None, process_group: ProcessGroup | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Weights in bfloat16 become float16 on M1 and M2, which compute bfloat16 in software, if its range is enough. Models
    that mlx_lm runs keep their dtype.

    Args:
        path: A model folder, a run (its best checkpoint), a `.gguf` file, a llama2.c `.bin` file, a name of the catalog
            (`mlxlm models`) or a hub id ("owner/name"). What isn't on this machine is downloaded. An existing path has
            priority over a name.
        adapter: The folder or hub id of a LoRA or DoRA adapter of PEFT or mlx_lm, which is merged into the weights.
        process_group: Processes that share the model: only the part of this one is loaded, and each call of the model
            waits for the others. It keeps its dtype. For texts, use `load_split`.

    Returns:
        The model, its weights evaluated, for all other functions.

    Raises:
        CheckpointError: For unreadable weights, for an adapter that doesn't fit the model, and for a tokenizer with
            more tokens than the model. Fewer are normal: vocabularies are padded.
        ConfigError: For an invalid configuration or generation_config.json.
        TokenizerError: For an invalid tokenizer.
    """
    source = whole = checkpoint.open_checkpoint(path, adapter)
    if process_group is not None and isinstance(source, checkpoint.Checkpoint):
        source = split_checkpoint(source, process_group.rank, process_group.size)
    model, config = checkpoint.load_checkpoint(source)
    text_tokenizer = source.load_tokenizer()
    if text_tokenizer.min_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {text_tokenizer.min_vocab_size} tokens and the model {config.vocab_size}",
            "the tokenizer files that belong to these weights",
        )
    if process_group is not None and isinstance(whole, checkpoint.Checkpoint):
        model.split(process_group, whole.config)
    elif process_group is not None:
        shard_with_mlx_lm(model, process_group, source.path)
    converts = device.emulates_bfloat16() and isinstance(model, Decoder) and process_group is None
    if converts and not convert_to_float16(model, text_tokenizer.encode(_SAMPLE)):
        model, config = checkpoint.load_checkpoint(source)
    eval_weights(model)
    generation_config = read_generation_config(source, str(path))
    return LoadedModel(model, text_tokenizer, config, Path(path), generation_config, source.embedding)


def loaded(lm: LoadedModel | Path | str) -> LoadedModel:
    """Return the model; load one that is given by its name, path or hub id, unless it was the last such one."""
    if isinstance(lm, LoadedModel):
        return lm
    if not isinstance(lm, str | Path):
        raise GenerationError(f"{lm!r:.60} is not a model", 'mlxlm.load("small-world"), or a name')
    with _named_lock:
        if str(lm) not in _named:
            _named.clear()  # frees its memory before the next one is loaded
            _named[str(lm)] = load(lm)
        return _named[str(lm)]


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
