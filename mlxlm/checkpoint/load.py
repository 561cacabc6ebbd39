"""Load a model, ready to run: whole, or one layer at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.cpu_extension import load_extension
from mlxlm.backend.mlx import ON_CPU, eval_in_parallel, mx, nn
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors, quantize_modules, rounded_scales, unpacked_shapes
from mlxlm.checkpoint.lazy_tensor import LazyTensors, memory_size
from mlxlm.checkpoint.mlx_lm import MlxLmConfig, ModuleCheckpoint, build_with_mlx_lm, load_with_mlx_lm
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization
from mlxlm.kernels.quantized_matmul import multiplies_on_cpu
from mlxlm.model import Block, Decoder
from mlxlm.model.block import layer_caches
from mlxlm.model.decoder import Embedding
from mlxlm.model.experts import SwitchLinear
from mlxlm.model.linear import Linear
from mlxlm.model.norms import add_norm, make_norm
from mlxlm.utils.errors import CheckpointError

_MAX_MEMORY_FRACTION = 0.9  # for the weights
_MULTIPLIED_ON_CPU = (Linear, Embedding, SwitchLinear)  # without being dequantized
LAYER_PREFIX = "model.layers"
# State between two layers: the residual stream and the previous layer's output, not yet added to it (None after the
# embedding, and with norms on the residual stream), both [B, T, hidden].
HiddenState = tuple[mx.array, mx.array | None]


def load_model(source: Path | str, adapter: Path | str | None = None) -> tuple[nn.Module, ModelConfig | MlxLmConfig]:
    """Load a model in evaluation mode; see `open_checkpoint` for the arguments and `load_checkpoint` for the dtypes.

    Raises:
        CheckpointError, ConfigError: Names the file and the field.
    """
    return load_checkpoint(open_checkpoint(source, adapter))


def load_checkpoint(checkpoint: AnyCheckpoint) -> tuple[nn.Module, ModelConfig | MlxLmConfig]:
    """Load the model of an open checkpoint in evaluation mode.

    Quantized weights stay quantized (those of a GGUF file in MLX's format, see `gguf.affine`). On a GPU, other weights
    keep their dtype and are read on first use. On a CPU, they are read immediately and converted to float32, since
    MLX's half-precision products are 10 to 1000 times slower there; and so are quantized ones that `multiplies_on_cpu`
    doesn't know. If they don't fit in memory, all weights keep their dtype, with a warning.

    Raises:
        CheckpointError: The weights don't fit in memory at all.
    """
    if isinstance(checkpoint, ModuleCheckpoint):
        model, _ = build_with_mlx_lm(checkpoint)
        load_submodule(model, checkpoint.tensors, "", checkpoint.quantization)
        return model, checkpoint.config
    if not isinstance(checkpoint, Checkpoint):
        return load_with_mlx_lm(checkpoint)
    stored = checkpoint.packed or checkpoint
    in_float32 = ON_CPU and _fits_float32(stored)
    source = stored
    if in_float32 and stored.config.quantization and (reason := load_extension().unavailable_reason):
        source = checkpoint
        problem = "quantized weights are dequantized, which is slower and takes more memory"
        warnings.warn(f"{problem}: {reason}", stacklevel=2)
    model = Decoder(source.config)
    load_submodule(model, _rounded_scales(source), "", source.config.quantization, in_float32)
    return model, source.config


def weights_memory(checkpoint: AnyCheckpoint, parameters: int) -> int:
    """Bytes of the weights once they are loaded on this machine."""
    stored = checkpoint.packed or checkpoint if isinstance(checkpoint, Checkpoint) else checkpoint
    if ON_CPU:
        if not isinstance(stored, Checkpoint):
            return 4 * parameters
        needed = _cpu_memory(stored)
        if fits_on_cpu(needed, platform.total_memory()):
            return needed
    return memory_size(stored.tensors.values())


def fits_on_cpu(needed: int, memory: int) -> bool:
    """Whether `memory` bytes have room for weights of `needed` bytes on a CPU, and for everything else."""
    return needed < 0.7 * memory


def _cpu_memory(checkpoint: Checkpoint) -> int:
    """Bytes of the weights on a CPU: float32, except for those that stay quantized."""
    tensors, quantization = checkpoint.tensors, checkpoint.config.quantization or {}
    packed = [name.rpartition(".")[0] for name in tensors if name.endswith(".scales")]
    stay = [name for name in packed if _stays_quantized(module_quantization(quantization, name))]
    quantized = {f"{name}.{kind}" for name in stay for kind in ("weight", "scales", "biases")}
    shapes = unpacked_shapes(tensors, quantization, str(checkpoint.path))
    floats = sum(math.prod(shape) for name, shape in shapes.items() if name not in quantized)
    return memory_size(tensors[name] for name in quantized) + 4 * floats


def _fits_float32(checkpoint: Checkpoint) -> bool:
    """Whether the weights fit in memory in float32. Warns if not; raises if they don't fit in their dtype either."""
    memory, needed = platform.total_memory(), _cpu_memory(checkpoint)
    if fits_on_cpu(needed, memory):
        return True
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    hint = "mlxlm quantize" if checkpoint.config.quantization is None else "mlxlm quantize with fewer bits"
    if stored >= _MAX_MEMORY_FRACTION * memory:
        raise CheckpointError(
            f"{checkpoint.path}: its weights take {stored / 1e9:.3g} GB, this machine has {memory / 1e9:.3g} GB", hint
        )
    problem = f"{checkpoint.path} needs {needed / 1e9:.3g} GB on a CPU, this machine has {memory / 1e9:.3g} GB"
    warnings.warn(f"{problem}: it keeps its dtype, which is slow on a CPU (try: {hint})", stacklevel=3)
    return False


def load_float32_weights(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Load all weights of a decoder by name, dequantized, in float32, as training needs them."""
    quantization = checkpoint.config.quantization
    return _in_float32(dequantize_tensors(checkpoint.tensors, quantization) if quantization else checkpoint.tensors)


def load_submodule(
    module: nn.Module,
    tensors: LazyTensors,
    prefix: str,
    quantization: Mapping[str, Any] | None = None,
    fits_float32: bool = True,
) -> None:
    """Load the weights of one part of a decoder.

    Quantized matrices become quantized layers. On a CPU, other weights become float32, and so do quantized ones of a
    format or in a layer for which there are only MLX's products.

    Args:
        module: The part, changed in place.
        tensors: Tensors of the whole decoder.
        prefix: Where the part is: "model.layers.3", or "" for all of it.
        quantization: The configuration's `quantization`.
        fits_float32: If False, weights keep their dtype and quantization on a CPU, too.
    """
    prefix = f"{prefix}." if prefix else ""
    part = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    scales: set[str] = set()  # of matrices that stay quantized on a CPU
    if quantization and ON_CPU and fits_float32:
        layers = {f"{prefix}{name}": layer for name, layer in module.named_modules()}
        packed = {name.rpartition(".")[0] for name in part if name.endswith(".scales")}
        stay = {
            name
            for name in packed
            if isinstance(layers[name], _MULTIPLIED_ON_CPU)
            and _stays_quantized(module_quantization(quantization, name))
        }
        part = dequantize_tensors(part, {**quantization, **dict.fromkeys(stay, False)})
        scales = {f"{name}.{kind}" for name in stay for kind in ("scales", "biases")}
    if quantization:
        quantize_modules(module, part, prefix, quantization)
    if ON_CPU and (fits_float32 or quantization):  # with 16-bit scales, MLX's quantized products are even slower
        values = _in_float32({name: tensor for name, tensor in part.items() if name not in scales})
        values |= {name: part[name].read() for name in scales}
    else:
        values = {name: tensor.read() for name, tensor in part.items()}
    module.load_weights([(name.removeprefix(prefix), value) for name, value in values.items()])
    module.eval()


def _stays_quantized(format: Mapping[str, Any] | None) -> bool:
    return format is not None and multiplies_on_cpu(**format)


def _rounded_scales(checkpoint: Checkpoint) -> LazyTensors:
    """The tensors of a checkpoint, on a GPU with rounded scales and biases of models that other programs quantized.

    They are float32, to be exact, and get the dtype of most other tensors: activations get the wider of the two.
    """
    foreign, tensors = checkpoint.hf_config.get("quantization_config"), checkpoint.tensors
    if ON_CPU or not (isinstance(foreign, Mapping) and "quant_method" in foreign):
        return tensors
    return {**tensors, **rounded_scales(tensors)}


def _in_float32(tensors: LazyTensors) -> dict[str, mx.array]:
    """Read and convert floating-point values, few tensors at a time, on two cores.

    Converting on first use would keep both forms of all weights in memory: 50% more for 16-bit weights, and a third
    more time.
    """
    try:
        values = eval_in_parallel(tensor.transform(as_float32).read for tensor in tensors.values())
        return dict(zip(tensors, values, strict=True))
    except RuntimeError as error:
        hint = "a file that no other program is writing"
        raise CheckpointError(f"the weights can't be read: {error}", hint) from None


class LayerwiseModel:
    """The parts of a checkpoint's decoder, each loaded when it is used.

    They are the decoder's own modules and compute the same values, bit for bit. Nothing is cached.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.config = checkpoint.config
        self._tensors = _rounded_scales(checkpoint)
        self._caches: list[list[Any]] = []  # of each batch, by layer
        self._per_layer_inputs: list[Sequence[mx.array | None]] = []  # the same
        self._top_tensors = {n: t for n, t in self._tensors.items() if not n.startswith(f"{LAYER_PREFIX}.")}

    def embeddings(self, batches: Iterable[mx.array]) -> Iterator[HiddenState]:
        """Yield the state before the first layer of each batch of tokens, int `[B, T]`; the embedding is read once."""
        model = Decoder(self.config, layers=0).model
        load_submodule(model, self._top_tensors, "model", self.config.quantization)
        self._caches, self._per_layer_inputs = [], []
        for tokens in batches:
            residual = model.embed(tokens)
            mx.eval(residual)  # otherwise its graph keeps the embedding in memory
            inputs = model.per_layer_inputs(tokens, residual) or [None] * self.config.num_hidden_layers
            mx.eval(inputs)
            self._per_layer_inputs.append(inputs)
            self._caches.append(layer_caches(self.config.kv_layers))
            yield residual, None

    def run(self, block: Block, index: int, batch: int, state: HiddenState) -> HiddenState:
        """Apply layer `index`, which `load_layer` returned, to the state of a batch before it."""
        return block(*state, self._caches[batch][index], None, self._per_layer_inputs[batch][index])

    def load_layer(self, index: int) -> Block:
        """Load layer `index`, for `run`."""
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
