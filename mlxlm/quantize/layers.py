"""Models as calibration runs them: the layers one after another, each loaded when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Protocol

from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_map
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import LAYER_PREFIX, HiddenState, LayerwiseModel, load_submodule
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint, build_with_mlx_lm
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.quantize.intercept import intercept
from mlxlm.utils.errors import ArgumentError

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


class Layers(Protocol):
    """The layers of a model.

    Attributes:
        names: Name of each layer.
        tables: Names of the embeddings, which select rows.
        tied_table: The embedding that is also the head; None if the head is a matrix of its own.
    """

    names: list[str]
    tables: list[str]
    tied_table: str | None

    def embed(self, batches: Iterable[mx.array]) -> Iterator[mx.array]:
        """Yield the hidden state `[B, T, hidden]` before the first layer of each batch of tokens, int `[B, T]`."""

    def load(self, index: int) -> nn.Module:
        """Load a layer; the one loaded before must not be used any more."""

    def run(self, layer: nn.Module, index: int, batch: int, state: mx.array) -> mx.array:
        """Run a layer that `load` returned on the hidden state of a batch."""

    def head_inputs(self, batch: int, state: mx.array) -> Mapping[str, mx.array]:
        """The inputs of the matrices after the last layer, from the hidden state there."""

    def logits(self, state: mx.array) -> mx.array:
        """The logits `[B, T, V]`, from the hidden state after the last layer."""


def layers_of(checkpoint: WritableCheckpoint) -> Layers:
    """The layers of a checkpoint.

    Raises:
        ArgumentError: A model of mlx_lm's classes doesn't run as one layer after another.
    """
    return DecoderLayers(checkpoint) if isinstance(checkpoint, Checkpoint) else ModuleLayers(checkpoint)


class DecoderLayers:
    """The layers of mlxlm's decoder."""

    def __init__(self, checkpoint: Checkpoint):
        config = checkpoint.config
        self._model = LayerwiseModel(checkpoint)
        self.names = [f"{LAYER_PREFIX}.{index}" for index in range(config.num_hidden_layers)]
        self.tables = [n.removesuffix(".weight") for n in checkpoint.tensors if n.startswith("model.embed")]
        self.tied_table = EMBEDDING if config.tie_word_embeddings else None

    def embed(self, batches: Iterable[mx.array]) -> Iterator[mx.array]:
        """See `Layers`."""
        return map(_merge, self._model.embeddings(batches))

    def load(self, index: int) -> nn.Module:
        """See `Layers`."""
        return self._model.load_layer(index)

    def run(self, layer: nn.Module, index: int, batch: int, state: mx.array) -> mx.array:
        """See `Layers`."""
        return _merge(self._model.run(layer, index, batch, (state, None)))

    def head_inputs(self, batch: int, state: mx.array) -> Mapping[str, mx.array]:
        """See `Layers`."""
        return {self.tied_table or HEAD: self._norm(state, None)}

    def logits(self, state: mx.array) -> mx.array:
        """See `Layers`."""
        return self._head(state, None)

    @cached_property
    def _norm(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        return self._model.final_norm()

    @cached_property
    def _head(self) -> Callable[[mx.array, mx.array | None], mx.array]:
        return self._model.head()


def _merge(state: HiddenState) -> mx.array:
    residual, hidden_states = state
    return residual if hidden_states is None else residual + hidden_states


class ModuleLayers:
    """The layers of a model of mlx_lm's classes.

    The model itself computes their arguments (masks, for example), while its layers return their input as it is. That
    the next layer gets the same array shows that nothing happens between two layers.
    """

    def __init__(self, checkpoint: ModuleCheckpoint):
        self._model, _ = build_with_mlx_lm(checkpoint)
        self._tensors, self._kind = checkpoint.tensors, checkpoint.config.model_type
        modules = dict(self._model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        self._layers = list(self._model.layers)
        self.names = [names[id(layer)] for layer in self._layers]
        prefixes = tuple(f"{name}." for name in self.names)
        outside = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(prefixes)}
        values = ((name, tensor.read()) for name, tensor in outside.items())
        self._model.load_weights([(n, as_float32(value) if ON_CPU else value) for n, value in values], strict=False)
        self._model.eval()
        self._arguments: list[list[tuple[Any, Any]]] = []  # of each layer, by batch
        self._tokens: list[mx.array] = []
        self._calls: list[tuple[Any, Any]] = []  # of the layers, when the model last ran without them
        self._without_layers = False  # while it does
        self._state: mx.array | None = None  # what the first layer returns then
        self._expected: mx.array | None = None  # what the next layer must be given
        self._head_inputs: dict[str, mx.array] = {}
        self._loaded: nn.Module | None = None
        for index, layer in enumerate(self._layers):
            intercept(layer, "__call__", partial(self._call, index))
        self.tables = []
        for name, module in checkpoint.quantizable().items():
            own = modules[name]
            if isinstance(module, nn.Embedding):
                self.tables.append(name)
                intercept(own, "as_linear", partial(self._note_input, name))
            elif isinstance(module, nn.Linear) and not name.startswith(prefixes):
                intercept(own, "__call__", partial(self._note_input, name))
        self._run_without_layers(mx.zeros((1, 2), mx.int32))
        self.tied_table = next((name for name in self.tables if name in self._head_inputs), None)

    def embed(self, batches: Iterable[mx.array]) -> Iterator[mx.array]:
        """See `Layers`."""
        self._arguments, self._tokens = [], []
        for tokens in batches:
            state = self._run_without_layers(tokens)
            self._arguments.append(self._calls)
            self._tokens.append(tokens)
            yield state

    def load(self, index: int) -> nn.Module:
        """See `Layers`."""
        if self._loaded is not None:
            self._loaded.update(tree_map(mx.zeros_like, self._loaded.parameters()))  # lazy: they take no memory
        layer = self._loaded = self._layers[index]
        load_submodule(layer, self._tensors, self.names[index])
        return layer

    def run(self, layer: nn.Module, index: int, batch: int, state: mx.array) -> mx.array:
        """See `Layers`."""
        args, options = self._arguments[batch][index]
        result = layer(state, *args, **options)
        if not isinstance(result, mx.array):
            raise self._error("a layer returns more than its hidden state")
        return result

    def head_inputs(self, batch: int, state: mx.array) -> Mapping[str, mx.array]:
        """See `Layers`."""
        self._run_without_layers(self._tokens[batch], state)
        return self._head_inputs

    def logits(self, state: mx.array) -> mx.array:
        """See `Layers`."""
        self._run_without_layers(mx.zeros(state.shape[:2], mx.int32), state)
        return self._logits

    def _run_without_layers(self, tokens: mx.array, state: mx.array | None = None) -> mx.array:
        """Run the model with layers that return their input, or the first of them `state`; returns its input."""
        self._calls, self._state, self._expected, self._head_inputs = [], state, None, {}
        self._without_layers = True
        try:
            self._logits = self._model(tokens)  # lazily: only what is used is evaluated
        except ArgumentError:
            raise
        except Exception as error:  # a layer that returns several values, or isn't called by position
            raise self._error(f"mlx_lm's class doesn't run as one layer after another ({error})") from error
        finally:
            self._without_layers = False
        if len(self._calls) != len(self._layers):
            raise self._error("mlx_lm's class doesn't call every layer once")
        return self._first_input

    def _call(self, index: int, original: Callable[..., Any], x: mx.array, *args: Any, **options: Any) -> Any:
        if not self._without_layers:
            return original(x, *args, **options)
        if index != len(self._calls) or (index and x is not self._expected):
            raise self._error("mlx_lm's class computes something between its layers")
        if any(hasattr(value, "update_and_fetch") for value in (*args, *options.values())):  # Gemma 3n
            raise self._error("its layers share keys and values")
        if index == 0:
            self._first_input = x
        self._calls.append((args, options))
        self._expected = self._state if index == 0 and self._state is not None else x
        return self._expected

    def _note_input(self, name: str, original: Callable[..., Any], x: mx.array) -> Any:
        self._head_inputs[name] = x
        return original(x)

    def _error(self, problem: str) -> ArgumentError:
        return ArgumentError(f"{self._kind} models can't be calibrated: {problem}", "method rtn")
