"""Small valid checkpoints of every format, to be damaged by tests."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import save_weights
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf
from mlxlm.tokenizer import Tokenizer, sentencepiece, train
from tests.checkpoint.packed_weights import awq, gptq, nf4, pack_model
from tests.checkpoint.raw_files import add_sizes, finish
from tests.quantized_weights import quantized_weights
from tests.small_models import arrays_of, random_decoder, sentencepiece_proto, sentencepiece_tokenizer

VOCAB = 300
CONFIG = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TEXT = "the cat sat on a mat and saw two birds in the old garden while rain fell on a hat, that cat.\n" * 20


@dataclass(frozen=True)
class Sample:
    """A checkpoint in `folder`, opened by `source`; `targets` are the files that tests damage."""

    folder: Path
    source: Path
    targets: tuple[Path, ...]

    def copy(self, to: Path) -> Sample:
        """Copy it to another folder."""
        shutil.copytree(self.folder, to)

        def in_copy(path: Path) -> Path:
            return to / path.relative_to(self.folder)

        return Sample(to, in_copy(self.source), tuple(map(in_copy, self.targets)))


def llama_tokenizer() -> Tokenizer:
    """A SentencePiece tokenizer like Llama 2's: a dummy prefix, bytes from id 3."""
    return sentencepiece_tokenizer(sentencepiece_proto(VOCAB, tuple(TEXT.splitlines()), hard_vocab_limit=False))


def weights() -> dict:
    return arrays_of(random_decoder(CONFIG))


def make(kind: str, folder: Path) -> Sample:
    """Make a valid checkpoint, one of KINDS."""
    folder.mkdir()
    return KINDS[kind](folder)


def _folder(
    folder: Path, targets: str, tokenizer: Tokenizer | None = None, removed: str | None = None, **options
) -> Sample:
    """A folder of safetensors, the kind of most samples, without the file `removed`."""
    save_weights(folder, weights(), **options)
    (folder / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    (tokenizer or train([TEXT], 268)).save(folder)
    if removed:
        (folder / removed).unlink()
    return Sample(folder, folder, tuple(folder / name for name in targets.split()))


def _shards(folder: Path) -> Sample:
    sample = _folder(folder, "model.safetensors.index.json", shard_bytes=30_000)
    return Sample(folder, folder, (*sample.targets, *sample.targets, *sorted(folder.glob("*.safetensors"))[:2]))


def _quantized(folder: Path) -> Sample:
    sample = _folder(folder, "model.safetensors config.json")
    packed, plan = quantized_weights(random_decoder(CONFIG), 4, 32)
    save_weights(folder, packed)
    (folder / "config.json").write_text(json.dumps({**config_to_hf(CONFIG), "quantization": plan}))
    return sample


def _tokenizer_gpt2(folder: Path) -> Sample:
    """GPT-2's two files."""
    sample = _folder(folder, "vocab.json merges.txt")
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return sample


def _packed(folder: Path, make, method: str) -> Sample:
    """Quantized by another program than MLX."""
    sample = _folder(folder, "model.safetensors model.safetensors config.json")
    stored, _ = pack_model(weights(), make)
    save_weights(folder, {name: mx.array(value) for name, value in stored.items()})
    settings = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps({**config_to_hf(CONFIG), "quantization_config": settings}))
    return sample


def _pytorch(folder: Path, legacy: bool = False) -> Sample:
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(np.array(value)) for name, value in weights().items()}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return _folder(folder, "pytorch_model.bin", removed="model.safetensors")


def _meta(folder: Path) -> Sample:
    """Meta's layout in two files."""
    torch = pytest.importorskip("torch")
    names = (
        ("model.embed_tokens", "tok_embeddings", 1), ("model.norm", "norm", None), ("q_proj", "wq", 0),
        ("k_proj", "wk", 0), ("v_proj", "wv", 0), ("o_proj", "wo", 1), ("gate_proj", "w1", 0), ("down_proj", "w2", 1),
        ("up_proj", "w3", 0), ("input_layernorm", "attention_norm", None),
        ("post_attention_layernorm", "ffn_norm", None),
    )  # fmt: skip
    for i in range(2):
        part = {}
        for name, value in weights().items():
            *_, axis = next(entry for entry in names if entry[0] in name)
            for old, other, _ in names:
                name = name.replace(old, other)
            name = name.removeprefix("model.").replace("self_attn", "attention").replace("mlp", "feed_forward")
            whole = torch.from_numpy(np.array(value))
            part[name] = whole if axis is None else whole.chunk(2, axis)[i].clone()
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    params = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "norm_eps": 1e-5, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(params))
    llama_tokenizer().save(folder)
    (folder / "tokenizer.json").unlink()
    files = ("params.json", "consolidated.00.pth", "consolidated.01.pth")
    return Sample(folder, folder, tuple(folder / name for name in files))


def _gguf(folder: Path, byte_level: bool = False) -> Sample:
    gguf = pytest.importorskip("gguf")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, CONFIG)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCAB)
    if byte_level:
        model = json.loads(train([TEXT], 268).to_json())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    else:
        proto = sentencepiece.parse(llama_tokenizer().sentencepiece_model, "test")
        tokens = [piece.piece for piece in proto.pieces]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([piece.score for piece in proto.pieces])
    tokens += [f"<unused{i}>" for i in range(len(tokens), VOCAB)]
    special = 8 if byte_level else 3
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < special or "unused" in tokens[i] else 1 for i in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in weights().items():
        for hf_name, gguf_name in GGUF_NAMES:
            name = name.replace(hf_name, gguf_name)
        value = np.array(value)
        if value.ndim == 1 or name.startswith("blk.0"):
            writer.add_tensor(name, value)
        elif name.startswith("blk.1"):
            kind = gguf.GGMLQuantizationType.Q8_0 if "attn" in name else gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value.astype(np.float16))
    finish(writer)
    return Sample(folder, path, (path,))


GGUF_NAMES = (
    ("model.layers.", "blk."), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"), ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
)  # fmt: skip


def _llama2c(folder: Path) -> Sample:
    from mlxlm.checkpoint.lazy_tensor import lazy_tensor
    from mlxlm.checkpoint.llama2c import write

    path = folder / "model.bin"
    tensors = {name: lazy_tensor(value) for name, value in weights().items()}
    write(path, CONFIG, tensors, llama_tokenizer())
    return Sample(folder, path, (path,))


def _llama2c_tokenizer(folder: Path) -> Sample:
    return Sample(folder, _llama2c(folder).source, (folder / "tokenizer.bin",))


KINDS = {
    "safetensors": lambda folder: _folder(folder, "model.safetensors"),
    "shards": _shards,
    "quantized": _quantized,
    "config": lambda folder: _folder(folder, "config.json"),
    "gptq": lambda folder: _packed(folder, gptq, "gptq"),
    "awq": lambda folder: _packed(folder, awq, "awq"),
    "bitsandbytes": lambda folder: _packed(folder, nf4, "bitsandbytes"),
    "pytorch": _pytorch,
    "pytorch-legacy": lambda folder: _pytorch(folder, legacy=True),
    "meta": _meta,
    "gguf": _gguf,
    "gguf-bpe": lambda folder: _gguf(folder, byte_level=True),
    "llama2c": _llama2c,
    "llama2c-tokenizer": _llama2c_tokenizer,
    "tokenizer-json": lambda folder: _folder(folder, "tokenizer.json tokenizer.json tokenizer_config.json"),
    # Llama 2's tokenizer without SentencePiece's file: a normalizer, byte fallback, a sequence of decoders.
    "tokenizer-json-llama": lambda folder: _folder(folder, "tokenizer.json", llama_tokenizer(), "tokenizer.model"),
    "tokenizer-gpt2": _tokenizer_gpt2,
    "tokenizer-model": lambda folder: _folder(folder, "tokenizer.model", llama_tokenizer(), "tokenizer.json"),
}
