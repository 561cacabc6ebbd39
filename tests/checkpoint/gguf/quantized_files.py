"""GGUF files of models whose matrices are random blocks of any type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf as gguf_package
import numpy as np

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.header import TensorInfo, ggml_type, read_header
from mlxlm.families import config_from_hf
from mlxlm.model import Decoder
from tests.checkpoint.raw_files import finish
from tests.small_models import random_decoder, tensors_of

# Where the float16 scale and minimum of a block are, if not in its first bytes.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
SIZES = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 307, "max_position_embeddings": 128,
}  # fmt: skip


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Bytes of a matrix whose weights have a standard deviation of 0.1, uint8 `[rows, bytes]`."""
    rng, ggml = np.random.default_rng(seed), ggml_type(kind)
    stored = rng.integers(0, 256, (rows, width // ggml.block_size * ggml.type_size), dtype=np.uint8)
    offsets = _SCALES.get(kind, (0, 2) if kind in _MINIMA else (0,))
    fields = [stored.reshape(-1, ggml.type_size)[:, at : at + 2] for at in offsets]
    values = [rng.uniform(0.5, 1, len(field)) * rng.choice([-1, 1], len(field)) for field in fields]

    def fill(factor: float) -> None:
        for field, value in zip(fields, values, strict=True):
            field[:] = (factor * value).astype(np.float16).view(np.uint8).reshape(-1, 2)

    fill(1)
    fill(0.1 / gguf_package.quants.dequantize(stored, gguf_package.GGMLQuantizationType[kind]).std())
    return stored


def tensor_file(path: Path, kind: str, stored: np.ndarray) -> TensorInfo:
    """A file with one tensor, x.weight, from its bytes."""
    writer = gguf_package.GGUFWriter(path, "test")
    writer.add_tensor("x.weight", stored, raw_dtype=gguf_package.GGMLQuantizationType[kind])
    finish(writer)
    return read_header(path).tensors["x.weight"]


def model_file(
    path: Path,
    tokenizer,
    kind_of: Callable[[str], str | None],
    extra: Mapping[str, tuple[str, np.ndarray]] | None = None,
    **fields,
) -> Decoder:
    """Write a Llama whose matrices have the types `kind_of(name)`, F32 for None; return it without these matrices.

    `extra` has the type and the bytes of further tensors by name.
    """
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = random_decoder(config_from_hf({**SIZES, **ids, **fields}))
    plain = path.with_name("plain.gguf")
    gguf.write(plain, model.config, tensors_of(model), tokenizer, "F32")
    whole = gguf_package.GGUFReader(plain)
    writer = gguf_package.GGUFWriter(path, "llama")
    for name, field in whole.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], *([] if len(kinds) == 1 else [kinds[-1]]))
    for i, tensor in enumerate(whole.tensors):
        kind = kind_of(tensor.name) if len(tensor.shape) == 2 else None
        data = tensor.data if kind is None else random_blocks(kind, *tensor.data.shape, seed=i)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf_package.GGMLQuantizationType[kind or "F32"])
    for name, (kind, data) in (extra or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf_package.GGMLQuantizationType[kind])
    finish(writer)
    plain.unlink()
    return model
