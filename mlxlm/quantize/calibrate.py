"""What flows into each linear layer of a decoder, measured block by block with one block in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_unflatten
from mlxlm.checkpoint.layerwise import LAYER_PREFIX, HiddenState, LayerwiseModel
from mlxlm.checkpoint.safetensors import file_tensors, save_tensors

_BATCH = 2048  # tokens that go through a block at once
_IN_MEMORY = 1 << 30  # bytes of hidden states; more of them go to files


@dataclass(frozen=True)
class InputStats:
    """What a linear layer reads over the calibration text, as sums over tokens, float32 `[width, width]`.

    moments: XᵀX of its inputs in the model as it is quantized so far. drift: (X₀ - X)ᵀX, X₀ being the source's
    inputs at the same tokens; None where there are none to compare with.
    """

    moments: np.ndarray
    dxxt: np.ndarray | None = None


# What is done with one block: its name, the block, and its layers' inputs by their names in the block. It sets the
# weights that the block goes on with.
OnBlock = Callable[[str, nn.Module, Mapping[str, InputStats]], None]


class _Recorder(nn.Module):
    """A linear layer that shows its inputs on the way."""

    def __init__(self, name: str, layer: nn.Module, sums: _Sums):
        super().__init__()
        self._name, self._layer, self._sums = name, layer, sums  # underscores: no parameters

    def __call__(self, x: mx.array) -> mx.array:
        self._sums.saw(self._name, x)
        return self._layer(x)


class _Sums:
    """Sums over batches: in each, inputs to calibrate with are shown, after the source's where these count."""

    def __init__(self) -> None:
        self._seen: dict[str, mx.array] = {}
        self._source: dict[str, mx.array] = {}
        self._sums: dict[str, list[mx.array]] = {}  # by the first layer that reads an input
        self._shared: dict[str, str] = {}  # layer: that first one

    def saw(self, name: str, x: mx.array) -> None:
        self._seen[name] = x

    def source_done(self) -> None:
        """What was seen were the source's."""
        self._source, self._seen = self._seen, {}

    def batch_done(self) -> None:
        """Add up. The same array for several layers (query, key and value) is multiplied once."""
        first: dict[int, str] = {}
        for name, x in self._seen.items():
            leader = self._shared[name] = first.setdefault(id(x), name)
            if leader != name:
                continue
            flat = _rows(x)
            own = [flat.T @ flat]
            if self._source:
                own.append((_rows(self._source[name]) - flat).T @ flat)
            before = self._sums.get(name)
            self._sums[name] = own if before is None else [x + y for x, y in zip(before, own, strict=True)]
        mx.eval(self._sums)
        self._seen, self._source = {}, {}

    def inputs(self) -> dict[str, InputStats]:
        """By layer, the same object for layers that read the same. The sums are handed over, not copied."""
        arrays = {name: InputStats(*(np.array(x, copy=False) for x in sums)) for name, sums in self._sums.items()}
        self._sums = {}
        return {name: arrays[first] for name, first in self._shared.items()}


def _rows(x: mx.array) -> mx.array:
    """[tokens, width] float32"""
    return x.reshape(-1, x.shape[-1]).astype(mx.float32)


@contextmanager
def _recorded(module: nn.Module) -> Iterator[_Sums]:
    """All linear layers of `module` record, until the end."""
    sums = _Sums()
    leaves = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    linear = [(name, leaf) for name, leaf in leaves if isinstance(leaf, nn.Linear)]
    module.update_modules(tree_unflatten([(name, _Recorder(name, leaf, sums)) for name, leaf in linear]))
    try:
        yield sums
    finally:
        module.update_modules(tree_unflatten(linear))


class _States:
    """A hidden state `[B, T, hidden]` for each batch of `tokens`: in memory, or in files where they are large."""

    def __init__(self, stages: LayerwiseModel, tokens: np.ndarray, folder: Path):
        folder.mkdir()
        self._folder = folder if 4 * tokens.size * stages.config.hidden_size > _IN_MEMORY else None
        rows = max(1, _BATCH // tokens.shape[1])
        batches = [mx.array(tokens[start : start + rows]) for start in range(0, len(tokens), rows)]
        self._kept: list[mx.array | None] = [None] * len(batches)
        for index, state in enumerate(stages.embeddings(batches)):
            self.put(index, state)

    def __len__(self) -> int:
        return len(self._kept)

    def state(self, index: int) -> HiddenState:
        kept = self._kept[index]
        return (file_tensors(self._file(index))["state"].read() if kept is None else kept), None

    def put(self, index: int, state: HiddenState) -> None:
        residual, hidden_states = state
        value = residual if hidden_states is None else residual + hidden_states
        if self._folder is None:
            mx.eval(value)
            self._kept[index] = value
        else:
            save_tensors(self._file(index), {"state": value})

    def _file(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"


def calibrate_blocks(
    source: LayerwiseModel | None, stages: LayerwiseModel, tokens: np.ndarray, on_block: OnBlock | None, scratch: Path,
    progress: Callable[[str], None],
) -> InputStats:  # fmt: skip
    """Send `tokens` int `[N, T]` through the decoder; call `on_block` for each block. What the head then reads.

    A block gets what the blocks before it make as `on_block` left them, so that each makes up for the errors of
    those before. `stages` begin with the embedding to calibrate with; `source` is the model as it was, run beside it
    for `InputStats.dxxt`, or None. Without `on_block` all is as it is. Memory: one block, its sums, and one or two hidden
    states per token, those beyond a gigabyte in the folder `scratch`. `progress` is told each block that is done.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        states = _States(stages, tokens, Path(folder) / "states")
        originals = None if source is None else _States(source, tokens, Path(folder) / "originals")
        for index in range(stages.num_layers):
            name, block = f"{LAYER_PREFIX}.{index}", stages.load_layer(index)
            if on_block is not None:
                with _recorded(block) as sums:
                    for i in range(len(states)):
                        if originals is not None:
                            originals.put(i, block(*originals.state(i)))
                            sums.source_done()
                        block(*states.state(i))
                        sums.batch_done()
                on_block(name, block, sums.inputs())
            for i in range(len(states)):
                states.put(i, block(*states.state(i)))
            del block  # before the next one is read
            mx.clear_cache()
            progress(name)
        final_norm, sums = stages.final_norm(), _Sums()
        for i in range(len(states)):
            if originals is not None:
                sums.saw("head", final_norm(*originals.state(i)))
                sums.source_done()
            sums.saw("head", final_norm(*states.state(i)))
            sums.batch_done()
    return sums.inputs()["head"]
