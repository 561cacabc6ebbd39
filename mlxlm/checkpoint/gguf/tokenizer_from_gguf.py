"""Rebuild the tokenizer of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from mlxlm.checkpoint.gguf.metadata import MetadataReader
from mlxlm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from mlxlm.checkpoint.gguf.reader import Array
from mlxlm.tokenizer import Tokenizer, sentencepiece
from mlxlm.tokenizer.sentencepiece import CONTROL, MAX_PIECE_LENGTH, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from mlxlm.tokenizer.tokenizer import bos_eos_processor
from mlxlm.utils.errors import TokenizerError

_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "pad": None, "unk": 0}  # llama.cpp's defaults


def read_tokenizer(keys: MetadataReader) -> Tokenizer:
    """Rebuild the tokenizer of a file: SentencePiece BPE ("llama") or byte-level BPE ("gpt2").

    Raises:
        TokenizerError: Names the file and the key; also for other types of tokenizers.
    """
    kind = keys.text("tokenizer.ggml.model", "none")
    build = {"llama": _from_pieces, "gpt2": _from_merges}.get(kind)
    if build is None:
        raise _error(keys, f"tokenizer.ggml.model is {kind!r}, which is not supported", "a model with llama or gpt2")
    tokens = _strings(keys, "tokenizer.ggml.tokens")
    types = _numbers(keys, "tokenizer.ggml.token_type", len(tokens), NORMAL)
    while types and types[-1] == UNUSED:  # rows of the embedding without a token
        types.pop()
    tokens = tokens[: len(types)]
    if len(set(tokens)) != len(tokens):
        raise _error(keys, "tokenizer.ggml.tokens has duplicates")
    return build(keys, tokens, types)


def _from_merges(keys: MetadataReader, tokens: list[str], types: list[int]) -> Tokenizer:
    name = keys.text("tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        problem = f"tokenizer.ggml.pre is {name!r}, which is unknown" if name else "there is no tokenizer.ggml.pre"
        raise _error(keys, f"{problem}; without it the ids would be wrong", "the model's tokenizer.json")
    merges = []
    for merge in _strings(keys, "tokenizer.ggml.merges"):
        space = merge.find(" ", 1)
        if space < 0:
            raise _error(keys, f"tokenizer.ggml.merges has {merge[:40]!r}, which is not a pair")
        merges.append((merge[:space], merge[space + 1 :]))
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises Exception itself
        raise _error(keys, f"tokenizer.ggml.merges: {error}") from None
    runtime = tokenizers.Tokenizer(model)
    if normalizer := pre.normalizer():
        runtime.normalizer = normalizer
    runtime.pre_tokenizer = pre.pre_tokenizer()
    runtime.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    runtime.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _add_user_defined(runtime, tokens, types)
    names = _special_token_names(keys, tokens, dict.fromkeys(_ROLES))
    bos, eos = _added_bos_eos(keys, names, pre.add_bos)
    runtime.post_processor = (
        bos_eos_processor(runtime, bos, eos) if bos or eos else processors.ByteLevel(trim_offsets=False)
    )
    return Tokenizer(runtime, names, chat_template=_chat_template(keys))


def _from_pieces(keys: MetadataReader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _numbers(keys, "tokenizer.ggml.scores", len(tokens), None)
    names = _special_token_names(keys, tokens, _SENTENCEPIECE_IDS)
    # Merges make runs of spaces, as in llama.cpp; a text contains no U+2581 that would match them.
    space_runs = {i for i, kind in enumerate(types) if kind == USER_DEFINED and SPACE in tokens[i]}
    types = [NORMAL if i in space_runs else kind for i, kind in enumerate(types)]
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == NORMAL and len(token) > MAX_PIECE_LENGTH:
            raise _error(keys, f"tokenizer.ggml.tokens has a token of more than {MAX_PIECE_LENGTH} characters")
        if not NORMAL <= kind <= sentencepiece.BYTE or math.isnan(score):
            raise _error(keys, f"tokenizer.ggml: token {token[:40]!r} has type {kind} and score {score}")
    model = sentencepiece.build(
        zip(tokens, scores, types, strict=True),
        {role: None if name is None else tokens.index(name) for role, name in names.items()},
        add_dummy_prefix=keys.flag("tokenizer.ggml.add_space_prefix", True),
        remove_extra_whitespaces=keys.flag("tokenizer.ggml.remove_extra_whitespaces", False),
    )
    bos, eos = _added_bos_eos(keys, names, True)
    runtime = sentencepiece.convert(model, add_bos=bos is not None, add_eos=eos is not None)
    _add_user_defined(runtime, tokens, types)
    representable = not {USER_DEFINED, UNUSED} & set(types)  # types that SentencePiece models are read with
    content = model.SerializeToString() if representable else None
    return Tokenizer(runtime, names, chat_template=_chat_template(keys), sentencepiece_model=content)


def _add_user_defined(runtime: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that are matched before any merge but are not special."""
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    runtime.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])


def _special_token_names(
    keys: MetadataReader, tokens: list[str], defaults: dict[str, int | None]
) -> dict[str, str | None]:
    """The special tokens by role."""
    names: dict[str, str | None] = {}
    rows = keys.header.metadata["tokenizer.ggml.tokens"].count  # including those without a token
    for role, stored in _ROLES.items():
        key = f"tokenizer.ggml.{stored}_token_id"
        present = key in keys.header.metadata
        id = keys.id(key) if present else defaults[role]
        if present and id is not None and id >= rows:
            raise _error(keys, f"{key} is {id}, there are {rows} tokens")
        names[role] = tokens[id] if id is not None and id < len(tokens) else None
    return names


def _added_bos_eos(keys: MetadataReader, names: dict[str, str | None], add_bos: bool) -> tuple[str | None, str | None]:
    """The tokens that `encode` adds in front of a text and at its end."""
    bos = keys.flag("tokenizer.ggml.add_bos_token", add_bos)
    eos = keys.flag("tokenizer.ggml.add_eos_token", False)
    return names["bos"] if bos else None, names["eos"] if eos else None


def _chat_template(keys: MetadataReader) -> str | None:
    return keys.text("tokenizer.chat_template", "") or None


def _strings(keys: MetadataReader, key: str) -> list[str]:
    value = keys.header.metadata.get(key)
    if not isinstance(value, Array) or not value.holds_strings or not value.count:
        raise _error(keys, f"{key} must be a list of strings")
    return value.read()


def _numbers(keys: MetadataReader, key: str, count: int, default: int | None) -> list[Any]:
    value = keys.header.metadata.get(key)
    if value is None and default is not None:
        return [default] * count
    if not isinstance(value, Array) or not value.holds_numbers or value.count < count:
        raise _error(keys, f"{key} must be a list of {count} numbers")
    return value.read()[:count]


def _error(keys: MetadataReader, message: str, hint: str | None = None) -> TokenizerError:
    return TokenizerError(f"{keys.header.path}: {message}", hint)
