"""Rename, split and reorder a file's tensors to the decoder's and back, lazily."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.utils.errors import CheckpointError


def to_decoder_weights(
    weight_mappings: Sequence[WeightMapping], tensors: LazyTensors, source: str
) -> dict[str, LazyTensor]:
    """Convert a file's tensors to the decoder's. Names without a mapping stay as they are.

    A fused tensor is read once for its parts: the other parts stay in memory until they are read, or until a part of
    another tensor is. The rows of a quantized matrix are independent, so weights, scales and biases are split alike.

    Raises:
        CheckpointError: Names `source` and a tensor whose number of rows is wrong.
    """
    by_name = {mapping.name: mapping for mapping in weight_mappings if not mapping.experts}
    of_expert = {name: (m, expert) for m in weight_mappings for expert, name in enumerate(m.expert_names())}
    stacks: dict[tuple[WeightMapping, str], dict[int, LazyTensor]] = {}
    cache: dict[str, list[mx.array | None]] = {}  # the unread parts of one fused tensor
    result = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if module in of_expert:
            stacked, expert = of_expert[module]
            stacks.setdefault((stacked, parameter), {})[expert] = tensor
            continue
        mapping = by_name.get(name) or by_name.get(module)
        if mapping is None:
            result[name] = tensor
            continue
        names = mapping.modules if mapping.name == name else [f"{part}.{parameter}" for part in mapping.modules]
        has_rows = mapping.is_read_only and tensor.shape[1:2] == (sum(mapping.rows),)  # as transformers decides
        whole = tensor if has_rows else _transpose(tensor, mapping, names[0])
        if mapping.channel_axis and len(whole.shape) == 3 and 1 in whole.shape[1:]:  # in PyTorch's order, or MLX's
            matrix = (whole.shape[0], whole.shape[1] * whole.shape[2])
            whole = whole.transform(partial(mx.reshape, shape=matrix), shape=matrix)
        if mapping.offset:
            whole = whole.transform(partial(_add, number=-mapping.offset))
        whole = _head_vector(whole, mapping)
        if mapping.interleaved:
            if not whole.shape or whole.shape[0] % (2 * mapping.interleaved):
                problem = f"is {list(tensor.shape)}, which {mapping.interleaved} heads of rotary pairs don't divide"
                raise CheckpointError(f"{source}: {name} {problem}")
            whole = whole.transform(partial(_reorder, mapping=mapping, pairs=(-1, 2)))
        if len(names) == 1:
            result[names[0]] = whole
            continue
        axis = mapping.row_axis
        if len(whole.shape) <= axis or whole.shape[axis] != sum(mapping.rows):
            raise CheckpointError(
                f"{source}: {name} is {list(tensor.shape)}, config.json says {sum(mapping.rows)} rows"
                f" ({', '.join(m.rpartition('.')[2] for m in mapping.modules)})"
            )
        for i, (part, rows) in enumerate(zip(names, mapping.rows, strict=True)):
            read, nbytes = _part_reader(cache, name, i, whole.read, mapping), whole.nbytes * rows // whole.shape[axis]
            shape = (*whole.shape[:axis], rows, *whole.shape[axis + 1 :])
            result[part] = replace(whole, shape=shape, nbytes=nbytes, read=read)
            if mapping.per_head and len(shape) == 2:
                result[part] = _per_head(result[part], mapping.groups, transposed=i == 0)
    for (stacked, parameter), parts in stacks.items():
        names = [f"{name}.{parameter}" for name in stacked.expert_names()]
        result[f"{stacked.modules[0]}.{parameter}"] = _head_vector(_stack(names, parts, source), stacked)
    return result


def to_file_weights(weight_mappings: Sequence[WeightMapping], tensors: LazyTensors) -> dict[str, LazyTensor]:
    """Convert the decoder's tensors to a file's: the inverse of `to_decoder_weights`."""
    written = [mapping for mapping in weight_mappings if not mapping.is_read_only]
    by_module = {module: mapping for mapping in written for module in mapping.modules}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        mapping = by_module.get(name) or by_module.get(module)
        if mapping is None:
            result[name] = tensor
            continue
        suffix = "" if name in mapping.modules else f".{parameter}"
        target = mapping.name + suffix
        if mapping.experts:
            tensor = _head_rows(tensor, mapping)
            cache: dict[str, list[mx.array | None]] = {}  # until all experts are read
            for expert, expert_name in enumerate(mapping.expert_names()):
                read, nbytes = _part_reader(cache, name, expert, tensor.read, mapping), tensor.nbytes // mapping.experts
                part = replace(tensor, shape=tensor.shape[1:], nbytes=nbytes, read=read)
                result[f"{expert_name}.{parameter}"] = part
            continue
        if target in result:
            continue
        parts = [tensors[part + suffix] for part in mapping.modules]
        if mapping.per_head:
            parts = [_of_all_heads(part, transposed=i == 0) for i, part in enumerate(parts)]
        whole = tensor if len(parts) == 1 else _fuse(parts, mapping)
        if mapping.interleaved:
            whole = whole.transform(partial(_reorder, mapping=mapping, pairs=(2, -1)))
        whole = _head_rows(whole, mapping)
        if mapping.channel_axis and len(whole.shape) == 2:
            shape = (*whole.shape[: mapping.channel_axis], 1, *whole.shape[mapping.channel_axis :])
            whole = whole.transform(partial(mx.reshape, shape=shape), shape=shape)
        if mapping.offset:
            whole = whole.transform(partial(_add, number=mapping.offset))
        result[target] = _transpose(whole, mapping, name)
    return result


def _head_vector(tensor: LazyTensor, mapping: WeightMapping) -> LazyTensor:
    """The rows of all heads as one vector, if the mapping says so."""
    if not mapping.head_vectors:
        return tensor
    return tensor.transform(mx.flatten, shape=(math.prod(tensor.shape),))


def _head_rows(tensor: LazyTensor, mapping: WeightMapping) -> LazyTensor:
    """The inverse of `_head_vector`."""
    if not (heads := mapping.head_vectors):
        return tensor
    return tensor.transform(lambda x: x.reshape(heads, -1), shape=(heads, tensor.shape[0] // heads))


def _add(value: mx.array, number: float) -> mx.array:
    return value + number


def _transpose(tensor: LazyTensor, mapping: WeightMapping, name: str) -> LazyTensor:
    """Transpose an unquantized weight of the decoder, `name`, or of the file."""
    is_matrix = name.endswith(".weight") and len(tensor.shape) == 2 + mapping.stacked
    if not (mapping.transposed and is_matrix and mx.issubdtype(tensor.dtype, mx.floating)):
        return tensor
    *experts, rows, columns = tensor.shape
    return tensor.transform(lambda value: value.swapaxes(-1, -2), shape=(*experts, columns, rows))


def _part_reader(
    cache: dict[str, list[mx.array | None]], name: str, index: int, read: Callable[[], mx.array], mapping: WeightMapping
) -> Callable[[], mx.array]:
    def part() -> mx.array:
        parts = cache.get(name)
        if parts is None or parts[index] is None:
            parts = _split(read(), mapping)
            cache.clear()
            cache[name] = parts
        value, parts[index] = parts[index], None
        if all(other is None for other in parts):
            cache.clear()
        return value

    return part


def _stack(names: Sequence[str], parts: Mapping[int, LazyTensor], source: str) -> LazyTensor:
    """The tensors `names` of all experts as one."""
    missing = [name for expert, name in enumerate(names) if expert not in parts]
    if missing:
        raise CheckpointError(f"{source}: {missing[0]} is missing ({len(missing)} of {len(names)} experts)")
    tensors = [parts[expert] for expert in range(len(names))]
    first = tensors[0]
    for name, tensor in zip(names, tensors, strict=True):
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CheckpointError(f"{source}: {name} is {list(tensor.shape)}, that of expert 0 {list(first.shape)}")
    nbytes = sum(tensor.nbytes for tensor in tensors)
    read = lambda: mx.stack([tensor.read() for tensor in tensors])  # noqa: E731
    return replace(first, shape=(len(names), *first.shape), nbytes=nbytes, read=read)


def _split(whole: mx.array, mapping: WeightMapping) -> list[mx.array | None]:
    if mapping.experts:
        return list(whole)
    axis = mapping.row_axis
    experts, tail = whole.shape[:axis], whole.shape[axis + 1 :]
    grouped = whole.reshape(*experts, mapping.groups, -1, *tail)
    ends, end = [], 0
    for rows in mapping.rows[:-1]:
        end += rows // mapping.groups
        ends.append(end)
    return [part.reshape(*experts, -1, *tail) for part in mx.split(grouped, ends, axis=axis + 1)]


def _fuse(parts: Sequence[LazyTensor], mapping: WeightMapping) -> LazyTensor:
    axis = mapping.row_axis
    experts, tail = parts[0].shape[:axis], parts[0].shape[axis + 1 :]

    def read() -> mx.array:
        grouped = [part.read().reshape(*experts, mapping.groups, -1, *tail) for part in parts]
        return mx.concatenate(grouped, axis=axis + 1).reshape(*experts, -1, *tail)

    rows = sum(part.shape[axis] for part in parts)
    return replace(parts[0], shape=(*experts, rows, *tail), nbytes=sum(part.nbytes for part in parts), read=read)


def _per_head(tensor: LazyTensor, heads: int, transposed: bool) -> LazyTensor:
    """Rows of all heads `[heads · rows, width]` as a matrix for each head, `[heads, rows, width]` or transposed."""
    rows, width = tensor.shape[0] // heads, tensor.shape[1]
    if transposed:
        return tensor.transform(lambda x: x.reshape(heads, rows, width).swapaxes(1, 2), shape=(heads, width, rows))
    return tensor.transform(lambda x: x.reshape(heads, rows, width), shape=(heads, rows, width))


def _of_all_heads(tensor: LazyTensor, transposed: bool) -> LazyTensor:
    """The inverse of `_per_head`."""
    heads, rows, width = tensor.shape
    if transposed:
        return tensor.transform(lambda x: x.swapaxes(1, 2).reshape(-1, rows), shape=(heads * width, rows))
    return tensor.transform(lambda x: x.reshape(-1, width), shape=(heads * rows, width))


def _reorder(value: mx.array, mapping: WeightMapping, pairs: tuple[int, int]) -> mx.array:
    """Swap the axes of the rotary rows of each head, which are in the shape `pairs`: (pairs, 2) or (2, pairs)."""
    tail = value.shape[1:]
    heads = value.reshape(mapping.interleaved, -1, *tail)
    rotary, rest = mx.split(heads, [mapping.rotary_dims or heads.shape[1]], axis=1)
    rotary = rotary.reshape(mapping.interleaved, *pairs, *tail).swapaxes(1, 2).reshape(rotary.shape)
    return mx.concatenate([rotary, rest], axis=1).reshape(value.shape)
