"""Small models with random weights, in memory and in folders, and a SentencePiece tokenizer like Llama 2's."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint import Checkpoint, save_weights
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer, sentencepiece
from mlxlm.utils.errors import TokenizerError
from mlxlm.utils.json_files import write_json

SENTENCES = ["the cat sat on a mat", "and saw two birds in the garden", "  while rain fell", "a hat, that cat"]


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    model = Decoder(config)
    model.init_weights(seed)
    return model


def arrays_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def tensors_of(model: nn.Module, dtype: mx.Dtype = mx.float32, **changed: mx.array) -> dict[str, LazyTensor]:
    """The tensors of a model by name, in `dtype`; `changed` arrays replace its own."""
    arrays = {name: value.astype(dtype) for name, value in arrays_of(model).items()}
    return {name: lazy_tensor(value) for name, value in (arrays | changed).items()}


def no_tokenizer() -> Tokenizer:
    raise TokenizerError("no tokenizer")


def in_memory(model: Decoder, path: str = "here", config: ModelConfig | None = None, **changed: mx.array) -> Checkpoint:
    """A checkpoint that is not in files, without a tokenizer."""
    config = config or model.config
    return Checkpoint(path, "safetensors", config_to_hf(config), tensors_of(model, **changed), no_tokenizer, config)


def write_folder(
    folder: Path,
    weights: nn.Module | dict[str, mx.array],
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    **values: Any,
) -> Path:
    """Write a model in Hugging Face's layout, with further fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, arrays_of(weights) if isinstance(weights, nn.Module) else weights)
    write_json(folder / "config.json", {**config_to_hf(config), **values})
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def write_peft(folder: Path, tensors: dict[str, mx.array], **config: Any) -> Path:
    """Write an adapter as PEFT does; a name without "base_model.model." gets it."""
    folder.mkdir(exist_ok=True)
    prefix = "base_model.model."
    named = {prefix + name.removeprefix(prefix): value for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), named)
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **config})
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Change fields of a folder's config.json."""
    import json

    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **values})


@functools.cache
def sentencepiece_proto(size: int = 300, sentences: tuple[str, ...] = tuple(SENTENCES * 5), **settings: Any) -> bytes:
    """A trained SentencePiece BPE model with byte tokens, by default of the kind that run.c has."""
    import sentencepiece as spm

    model = io.BytesIO()
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type="bpe", vocab_size=size, byte_fallback=True,
        **{**plain, **settings},
    )  # fmt: skip
    return model.getvalue()


def sentencepiece_tokenizer(proto: bytes) -> Tokenizer:
    model = sentencepiece.parse(proto, "test")
    names = sentencepiece.special_names(model)
    return Tokenizer(sentencepiece.convert(model), names, sentencepiece_model=proto)
