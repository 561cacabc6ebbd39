"""From a file's tensors to the decoder's and back, by the layout of its family; nothing is read here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.utils.errors import CheckpointError


def to_decoder_weights(
    weight_mappings: Sequence[WeightMapping], tensors: LazyTensors, source: str
) -> dict[str, LazyTensor]:
    """The decoder's tensors out of the file's. Names that `weight_mappings` doesn't know stay as they are.

    A fused tensor is read once for its parts: those that nobody has read yet stay in memory until they are, or until a
    part of another one is.

    Rows of a quantized matrix are as separate as those of any other, so weights, scales and biases take the
    same way. Raises CheckpointError, naming `source`, for a tensor whose rows don't add up.
    """
    known = {stored.name: stored for stored in weight_mappings}
    last: dict[str, list[mx.array]] = {}  # the parts of one fused tensor, so that three modules read it once
    result = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        stored = known.get(module)
        if stored is None:
            result[name] = tensor
            continue
        whole = _turned(tensor, stored, parameter)
        if stored.interleaved:
            if not whole.shape or whole.shape[0] % (2 * stored.interleaved):
                problem = f"is {list(tensor.shape)}, which {stored.interleaved} heads of rotary pairs don't divide"
                raise CheckpointError(f"{source}: {name} {problem}")
            whole = whole.transform(lambda value, heads=stored.interleaved: _halves(value, heads))
        if len(stored.modules) == 1:
            result[f"{stored.modules[0]}.{parameter}"] = whole
            continue
        if not whole.shape or whole.shape[0] != sum(stored.rows):
            raise CheckpointError(
                f"{source}: {name} is {list(tensor.shape)}, config.json says {sum(stored.rows)} rows"
                f" ({', '.join(m.rpartition('.')[2] for m in stored.modules)})"
            )
        for i, (part, rows) in enumerate(zip(stored.modules, stored.rows, strict=True)):
            result[f"{part}.{parameter}"] = LazyTensor(
                (rows, *whole.shape[1:]), whole.dtype, whole.stored_dtype, whole.nbytes * rows // whole.shape[0],
                _part_reader(last, name, i, whole.read, stored),
            )  # fmt: skip
    return result


def to_file_weights(weight_mappings: Sequence[WeightMapping], tensors: LazyTensors) -> dict[str, LazyTensor]:
    """The file's tensors out of the decoder's: the inverse of `to_decoder_weights`. Raises CheckpointError where a
    fused tensor lacks a part, or its parts are quantized differently."""
    home = {module: stored for stored in weight_mappings for module in stored.modules}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        stored = home.get(module)
        if stored is None:
            result[name] = tensor
            continue
        target = f"{stored.name}.{parameter}"
        if target in result:
            continue
        parts = [tensors.get(f"{part}.{parameter}") for part in stored.modules]
        if any(part is None or part.shape[1:] != tensor.shape[1:] or part.dtype != tensor.dtype for part in parts):
            raise CheckpointError(f"{target} joins {', '.join(stored.modules)}, which are not of one kind")
        if len(parts) > 1 and tuple(part.shape[0] for part in parts) != stored.rows:
            raise CheckpointError(f"{target} joins {', '.join(stored.modules)}, which need {stored.rows} rows")
        whole = tensor if len(parts) == 1 else _joined(parts, stored)
        if stored.interleaved:
            whole = whole.transform(lambda value, heads=stored.interleaved: _pairs(value, heads))
        result[target] = _turned(whole, stored, parameter)
    return result


def _turned(tensor: LazyTensor, stored: WeightMapping, parameter: str) -> LazyTensor:
    if not stored.transposed or parameter != "weight" or len(tensor.shape) != 2:
        return tensor
    return tensor.transform(mx.transpose, shape=tensor.shape[::-1])


def _part_reader(
    last: dict[str, list[mx.array]], name: str, index: int, read: Callable[[], mx.array], stored: WeightMapping
) -> Callable[[], mx.array]:
    def part() -> mx.array:
        parts = last.get(name)
        if parts is None or parts[index] is None:
            parts = _split(read(), stored)
            last.clear()
            last[name] = parts
        value, parts[index] = parts[index], None
        if all(other is None for other in parts):
            last.clear()
        return value

    return part


def _split(whole: mx.array, stored: WeightMapping) -> list[mx.array]:
    tail = whole.shape[1:]
    grouped = whole.reshape(stored.groups, -1, *tail)
    ends, end = [], 0
    for rows in stored.rows[:-1]:
        end += rows // stored.groups
        ends.append(end)
    return [part.reshape(-1, *tail) for part in mx.split(grouped, ends, axis=1)]


def _joined(parts: Sequence[LazyTensor], stored: WeightMapping) -> LazyTensor:
    tail = parts[0].shape[1:]

    def read() -> mx.array:
        grouped = [part.read().reshape(stored.groups, -1, *tail) for part in parts]
        return mx.concatenate(grouped, axis=1).reshape(-1, *tail)

    rows = sum(part.shape[0] for part in parts)
    return LazyTensor((rows, *tail), parts[0].dtype, parts[0].stored_dtype, sum(part.nbytes for part in parts), read)


def _halves(value: mx.array, heads: int) -> mx.array:
    """Rows in rotary pairs -> a head's first halves, then its second ones."""
    tail = value.shape[1:]
    return value.reshape(heads, -1, 2, *tail).swapaxes(1, 2).reshape(-1, *tail)


def _pairs(value: mx.array, heads: int) -> mx.array:
    tail = value.shape[1:]
    return value.reshape(heads, 2, -1, *tail).swapaxes(1, 2).reshape(-1, *tail)
