"""llama2.c's models and tokenizers: `.bin` files in the format that run.c reads (float32, version 0 of export.py).

Format: export.py, tokenizer.py and run.c of https://github.com/karpathy/llama2.c. A model's shapes follow from seven
numbers in the header, so a file's size must be exactly what they say.

`tokenizer.bin` has the pieces and scores of a SentencePiece BPE model, without its settings: the length of the longest
piece, uint32, then for each id a float32 score, a uint32 length and UTF-8 bytes. The number of ids is in the model's
header only. Spaces are stored as spaces, and the texts of ids 1 and 2 are between line breaks. run.c always puts a
space in front of a text, takes ids 0, 1, 2 for unknown, begin and end, and ids from 3 for the 256 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint, FileFormat
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, read_array
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.checkpoint.pytorch import is_pytorch_file
from mlxlm.config import ModelConfig
from mlxlm.config.components import RECURRENT
from mlxlm.config.rope_scaling import unscaled_wavelengths
from mlxlm.families import config_to_hf
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.tokenizer import Tokenizer, sentencepiece
from mlxlm.tokenizer.sentencepiece import SPACE
from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import CheckpointError, ConfigError, MissingTokenizerError, TokenizerError, os_errors_as

_MAGIC = b"24ka"  # the number 0x616b3432, "ak42", in little-endian order
_HEADER = struct.Struct("<7i")
_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_MAX_LAYERS = 4096  # the deepest models in use have about 130; each layer costs nine entries before one is read
_TOKENIZER = "tokenizer.bin"
_MAX_TOKENS = 1_000_000  # the largest vocabularies in use have about 260,000
_FIRST_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]  # what run.c expects
# run.c only merges pieces with a score above this one.
_NEVER_MERGED = -1e10


def open_llama2c(path: Path | str) -> Checkpoint:
    """Open a llama2.c model; its tokenizer is a `.bin` file next to it (see `find_tokenizer`).

    Only the header is read.

    Raises:
        CheckpointError: Names the file and the field of the header, or the tensor in which a truncated file ends.
    """
    path = Path(path)
    with os_errors_as(CheckpointError, "read", path):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
    config = _read_header(path, start)
    tensors: dict[str, LazyTensor] = {}
    end = _HEADER.size
    for name, shape in _tensor_order(config):
        offset, end = end, end + 4 * math.prod(shape)
        if end > size:
            problem = f"{name or 'the rotary table'} ends {end - size} bytes past the end"
            raise CheckpointError(f"{path} is truncated: {problem}", "copy or download the file again")
        if name:
            read = partial(_read_tensor, path, offset, shape)
            tensors[name] = LazyTensor(shape, mx.float32, "F32", end - offset, read)
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, its header says {end}", "a llama2.c model")
    return Checkpoint(
        path=path,
        format="llama2.c",
        hf_config=config_to_hf(config),
        tensors=to_decoder_weights(_weight_mappings(config), tensors, str(path)),
        load_tokenizer=lambda: read_tokenizer(find_tokenizer(path, config.vocab_size), config.vocab_size),
        config=config,
    )


FORMAT = FileFormat(lambda path, start: path.suffix == ".bin" and not is_pytorch_file(start), open_llama2c)


def check_output(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Check that a llama2.c file can have this model, and that `path` and `tokenizer.bin` next to it are free.

    Raises:
        ConfigError: Names a field that run.c can't represent. It computes Llama with a rotary base of 10000 and an
            epsilon of 1e-5 for every model.
        TokenizerError: run.c would encode text differently.
        CheckpointError: `tokenizer.bin` exists and is another one, or `path` has its name.
    """
    content = tokenizer_bytes(tokenizer, config.vocab_size)
    _check_representable(config)
    if path.name == _TOKENIZER:
        raise CheckpointError(f"{path} is the name of the tokenizer file", "model.bin")
    tokenizer_file = path.with_name(_TOKENIZER)
    with os_errors_as(CheckpointError, "read", tokenizer_file):
        if tokenizer_file.exists() and tokenizer_file.read_bytes() != content:
            raise CheckpointError(
                f"{tokenizer_file} already exists and belongs to another model", "another output folder"
            )


def write(path: Path, config: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer) -> None:
    """Write a file and `tokenizer.bin` next to it, one tensor in memory at a time.

    Call `check_output` before, and use `atomic_new_files`, so that a failed write leaves nothing.

    Raises:
        CheckpointError: A tensor has values that are not finite.
    """
    tensors = to_file_weights(_weight_mappings(config), tensors)
    path.with_name(_TOKENIZER).write_bytes(tokenizer_bytes(tokenizer, config.vocab_size))
    with path.open("wb") as file:
        sizes = {field: getattr(config, name) for field, name in _FIELDS.items()}
        sizes["vocab_size"] *= 1 if config.tie_word_embeddings else -1
        file.write(_HEADER.pack(*sizes.values()))
        for name, _ in _tensor_order(config):
            file.write(_float32_values(name, tensors[name]) if name else _rope_tables(config))


def _read_header(path: Path, start: bytes) -> ModelConfig:
    """The configuration from the first bytes of a file."""
    if start[:4] == _MAGIC:
        raise CheckpointError(f"{path} has a format that run.c doesn't read", "llama2.c's export.py --version 0")
    if len(start) < _HEADER.size:
        raise CheckpointError(f"{path} is truncated: its header has {len(start)} of {_HEADER.size} bytes")
    values = dict(zip(_FIELDS, _HEADER.unpack(start), strict=True))
    tied, values["vocab_size"] = values["vocab_size"] > 0, abs(values["vocab_size"])
    problems = [f"{name} is {value}, it must be positive" for name, value in values.items() if value < 1]
    if values["n_layers"] > _MAX_LAYERS:
        problems.append(f"n_layers is {values['n_layers']}, more than {_MAX_LAYERS}")
    if not problems and values["dim"] % values["n_heads"]:
        problems.append(f"dim {values['dim']} is not a multiple of n_heads {values['n_heads']}")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}", "a llama2.c model")
    try:
        return _config({_FIELDS[name]: value for name, value in values.items()}, tied)
    except ConfigError as error:
        raise error.prefixed(path, CheckpointError) from None


def _config(sizes: Mapping[str, Any], tied: bool) -> ModelConfig:
    return ModelConfig(**sizes, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)


def _tensor_order(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the decoder's names and the shapes in the order of the file; "" is the table of rotary angles."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    kv = config.num_key_value_heads * head_dim
    layer_modules = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "mlp.up_proj": (inner, hidden),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for module, shape in layer_modules.items():
        for i in range(config.num_hidden_layers):
            yield f"model.layers.{i}.{module}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "", (2, config.max_position_embeddings, head_dim // 2)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _weight_mappings(config: ModelConfig) -> list[WeightMapping]:
    """Queries and keys have rotary pairs in neighbouring rows."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return [
        WeightMapping(name, (name,), interleaved=n)
        for i in range(config.num_hidden_layers)
        for name, n in ((f"model.layers.{i}.self_attn.{part}", n) for part, n in heads.items())
    ]


def _read_tensor(path: Path, offset: int, shape: tuple[int, ...]) -> mx.array:
    return mx.array(read_array(path, np.float32, math.prod(shape), offset).reshape(shape))


def _check_representable(config: ModelConfig) -> None:
    """Raise ConfigError for a field that a llama2.c file can't represent."""
    plain = _config({name: getattr(config, name) for name in _FIELDS.values()}, config.tie_word_embeddings)
    ignored = {"model_type", "pad_token_id"}
    if config.layer_types is not None and RECURRENT.keys().isdisjoint(config.layer_types):
        ignored.add("layer_types")  # which have a meaning with sliding_window only
    for field in fields(ModelConfig):
        value, expected = getattr(config, field.name), getattr(plain, field.name)
        unset = value is None and field.name in ("bos_token_id", "eos_token_id")
        if not (field.name in ignored or value == expected or unset or (not value and not expected)):
            problem = f"{field.name} is {value!r}, but llama2.c always uses {expected!r}"
            raise ConfigError(problem, "a GGUF file or a folder as output")


def _rope_tables(config: ModelConfig) -> bytes:
    """Cosines of all positions, then sines, float32 `[max_position_embeddings, D/2]` each.

    run.c skips them and computes its own; programs derived from its first version read them.
    """
    frequencies = 1 / np.array(unscaled_wavelengths(config.rope_theta, config.head_dim))
    angles = np.outer(np.arange(config.max_position_embeddings), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32).tobytes()


def _float32_values(name: str, tensor: LazyTensor) -> memoryview:
    value = tensor.read().astype(mx.float32)
    if not mx.isfinite(value).all().item():
        raise CheckpointError(f"{name} has values that are not finite", "an undamaged checkpoint")
    return np.ascontiguousarray(np.asarray(value)).data


def find_tokenizer(model: Path, vocab_size: int) -> Path:
    """Find the tokenizer file next to a llama2.c model.

    Tries `NAME.tokenizer.bin`, `tok4096.bin` (llama2.c's name for tokenizers that it trains, by vocabulary size) and
    `tokenizer.bin`, in this order.

    Raises:
        MissingTokenizerError: There is none.
    """
    names = (f"{model.stem}.tokenizer.bin", f"tok{vocab_size}.bin", _TOKENIZER)
    for name in names:
        if model.with_name(name).is_file():
            return model.with_name(name)
    raise MissingTokenizerError(f"no tokenizer next to {model}", " or ".join(names))


def read_tokenizer(path: Path | str, vocab_size: int) -> Tokenizer:
    """Read a llama2.c tokenizer file; encoding gives the ids of SentencePiece (see `sentencepiece.convert`).

    Raises:
        TokenizerError: Names the file and the piece that is wrong.
    """
    path = Path(path)
    if vocab_size > _MAX_TOKENS:
        raise TokenizerError(f"the model of {path} has {vocab_size} tokens", f"a vocabulary of at most {_MAX_TOKENS}")
    with os_errors_as(TokenizerError, "read", path):
        size = path.stat().st_size
        if size > 4 + vocab_size * (8 + 4 * sentencepiece.MAX_PIECE_LENGTH):
            raise TokenizerError(f"{path} has {size} bytes, too many for the {vocab_size} tokens of the model")
        data = path.read_bytes()
    pieces = _pieces(data, path, vocab_size)
    _check_first_tokens([text for text, _ in pieces], str(path), "a tokenizer of llama2.c")
    proto = _proto(pieces).SerializeToString()
    model = sentencepiece.parse(proto, str(path))
    runtime = sentencepiece.convert(model)
    return Tokenizer(runtime, sentencepiece.special_names(model), sentencepiece_model=proto)


def tokenizer_bytes(tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """Return the content of `tokenizer.bin` for a model with `vocab_size` rows.

    Ids without a token get an unused one, which encoding never produces.

    Raises:
        TokenizerError: run.c would encode text differently than `tokenizer`.
    """
    hint = "a GGUF file or a folder as output"
    if tokenizer.sentencepiece_model is None:
        is_sentencepiece = tokenizer.tokenizer_type == "sentencepiece"
        problem = "has no tokenizer.model" if is_sentencepiece else f"is {tokenizer.tokenizer_type}"
        raise TokenizerError(f"llama2.c needs a SentencePiece tokenizer like Llama 2's, this one {problem}", hint)
    model = sentencepiece.parse(tokenizer.sentencepiece_model, "tokenizer.model")
    _check_first_tokens([piece.piece for piece in model.pieces], "this tokenizer", hint)
    rules = model.normalizer_spec
    if not rules.add_dummy_prefix:
        raise TokenizerError("this tokenizer doesn't put a space in front of a text, run.c does", hint)
    if rules.remove_extra_whitespaces:
        raise TokenizerError("this tokenizer removes repeated spaces, run.c keeps them", hint)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    added = {token["id"]: token["content"] for token in json.loads(tokenizer.to_json())["added_tokens"]}
    entries = []
    for i in range(vocab_size):
        piece = model.pieces[i] if i < len(model.pieces) else None
        if piece is not None and (i < len(_FIRST_TOKENS) or piece.type == sentencepiece.NORMAL):
            text, score = piece.piece, piece.score
        else:
            text, score = added.get(i, f"<unused{i}>"), _NEVER_MERGED
        text = f"\n{text}\n" if i in (1, 2) else text.replace(SPACE, " ")
        entries.append((score, text.encode("utf-8")))
    parts = [struct.pack("<I", max(len(text) for _, text in entries))]
    parts += [struct.pack("<fI", score, len(text)) + text for score, text in entries]
    return b"".join(parts)


def _pieces(data: bytes, path: Path, vocab_size: int) -> list[tuple[str, float]]:
    """Parse the file into texts (in SentencePiece's form) and scores."""
    if len(data) < 4:
        raise TokenizerError(f"{path} is truncated: it ends before max_token_length")
    (longest,) = struct.unpack_from("<I", data)
    hint = "the tokenizer of this model"
    offset = 4
    pieces = []
    for i in range(vocab_size):
        if offset + 8 > len(data):
            raise TokenizerError(f"{path} ends before token {i}, the model has {vocab_size}", hint)
        score, length = struct.unpack_from("<fI", data, offset)
        offset += 8
        if not math.isfinite(score):
            raise TokenizerError(f"{path}: the score of token {i} is {score}, it must be a finite number")
        if not 0 < length <= min(longest, len(data) - offset):
            limits = f"max_token_length is {longest}, {len(data) - offset} bytes are left"
            raise TokenizerError(f"{path}: token {i} is {length} bytes long, {limits}")
        text = decode_utf8(data[offset : offset + length], f"{path}: token {i}", TokenizerError, None)
        offset += length
        if i in (1, 2):
            text = text.removeprefix("\n").removesuffix("\n")
        pieces.append((text.replace(" ", SPACE), score))
    if offset != len(data):
        raise TokenizerError(f"{path} has data after token {vocab_size - 1}, the last one of the model", hint)
    return pieces


def _check_first_tokens(texts: list[str], name: str, hint: str) -> None:
    for i, text in enumerate(_FIRST_TOKENS):
        if i >= len(texts) or texts[i] != text:
            actual = repr(texts[i]) if i < len(texts) else "missing"
            raise TokenizerError(f"{name}: token {i} is {actual}, run.c needs {text!r}", hint)


def _proto(pieces: list[tuple[str, float]]) -> Any:
    """Build a SentencePiece model with the settings that run.c assumes."""
    kinds = [sentencepiece.UNKNOWN, sentencepiece.CONTROL, sentencepiece.CONTROL] + 256 * [sentencepiece.BYTE]
    for _, score in pieces[len(kinds) :]:
        kinds.append(sentencepiece.NORMAL if score > _NEVER_MERGED else sentencepiece.CONTROL)
    typed = ((text, score, kind) for (text, score), kind in zip(pieces, kinds, strict=True))
    ids = {"unk": 0, "bos": 1, "eos": 2, "pad": None}
    return sentencepiece.build(typed, ids, add_dummy_prefix=True, remove_extra_whitespaces=False)
