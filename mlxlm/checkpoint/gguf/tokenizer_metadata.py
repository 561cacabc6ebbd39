"""Tokenizers from and to llama.cpp's metadata."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from mlxlm.checkpoint.checkpoint import token_id_list
from mlxlm.checkpoint.gguf.header import Array, Header, MetadataReader
from mlxlm.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer, sentencepiece
from mlxlm.tokenizer.sentencepiece import BYTE, CONTROL, MAX_PIECE_LENGTH, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from mlxlm.tokenizer.tokenizer import bos_eos_processor, check_unicode
from mlxlm.utils.errors import TokenizerError

_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "pad": None, "unk": 0}  # llama.cpp's defaults
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_ADDED_SCORE, _PAD_SCORE = -1000.0, -10000.0  # as in llama.cpp's converter
Metadata = dict[str, Any]
Pieces = dict[int, tuple[str, float, int]]  # id -> text, score, type


def read_tokenizer(header: Header) -> Tokenizer:
    """Rebuild the tokenizer of a file: SentencePiece BPE ("llama", "gemma4") or byte-level BPE ("gpt2").

    Raises:
        TokenizerError: Names the file and the key; also for other types of tokenizers.
    """
    keys = MetadataReader(header, TokenizerError)
    kind = keys.text("tokenizer.ggml.model", "none")
    build = {"llama": _from_pieces, "gpt2": _from_merges, "gemma4": _from_merged_pieces}.get(kind)
    if build is None:
        raise keys.error(f"tokenizer.ggml.model is {kind!r}, which is not supported", "a model with llama or gpt2")
    tokens = _strings(keys, "tokenizer.ggml.tokens")
    types = _numbers(keys, "tokenizer.ggml.token_type", len(tokens), NORMAL)
    while types and types[-1] == UNUSED:  # rows of the embedding without a token
        types.pop()
    tokens = tokens[: len(types)]
    keys.check(len(set(tokens)) == len(tokens), "tokenizer.ggml.tokens has duplicates")
    return build(keys, tokens, types)


def _from_merges(keys: MetadataReader, tokens: list[str], types: list[int]) -> Tokenizer:
    name = keys.text("tokenizer.ggml.pre", "")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        problem = f"tokenizer.ggml.pre is {name!r}, which is unknown" if name else "there is no tokenizer.ggml.pre"
        raise keys.error(f"{problem}; without it the ids would be wrong", "the model's tokenizer.json")
    runtime = tokenizers.Tokenizer(_bpe(keys, tokens, ignore_merges=pre.ignore_merges))
    if normalizer := pre.normalizer():
        runtime.normalizer = normalizer
    runtime.pre_tokenizer = pre.pre_tokenizer()
    runtime.decoder = decoders.ByteLevel()
    _add_special(runtime, tokens, types)
    names = _special_token_names(keys, tokens, dict.fromkeys(_ROLES))
    bos, eos = _added_bos_eos(keys, names, pre.add_bos)
    runtime.post_processor = (
        bos_eos_processor(runtime, bos, eos) if bos or eos else processors.ByteLevel(trim_offsets=False)
    )
    return Tokenizer(runtime, names, chat_template=keys.text("tokenizer.chat_template", "") or None)


def _from_merged_pieces(keys: MetadataReader, tokens: list[str], types: list[int]) -> Tokenizer:
    """Gemma 4's: BPE of characters, where U+2581 stands for a space, with byte fallback."""
    names = _special_token_names(keys, tokens, dict.fromkeys(_ROLES))
    runtime = tokenizers.Tokenizer(_bpe(keys, tokens, unk_token=names["unk"], fuse_unk=True, byte_fallback=True))
    runtime.normalizer = normalizers.Replace(" ", SPACE)
    runtime.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_special(runtime, tokens, types)
    bos, eos = _added_bos_eos(keys, names, True)
    if bos or eos:
        runtime.post_processor = bos_eos_processor(runtime, bos, eos)
    return Tokenizer(runtime, names, chat_template=keys.text("tokenizer.chat_template", "") or None)


def _bpe(keys: MetadataReader, tokens: list[str], **options: Any) -> models.BPE:
    """The model of a file's tokens and merges."""
    merges = []
    for merge in _strings(keys, "tokenizer.ggml.merges"):
        space = merge.find(" ", 1)
        if space < 0:
            raise keys.error(f"tokenizer.ggml.merges has {merge[:40]!r}, which is not a pair")
        merges.append((merge[:space], merge[space + 1 :]))
    try:
        return models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **options)
    except Exception as error:  # tokenizers raises Exception itself
        raise keys.error(f"tokenizer.ggml.merges: {error}") from None


def _from_pieces(keys: MetadataReader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _numbers(keys, "tokenizer.ggml.scores", len(tokens), None)
    names = _special_token_names(keys, tokens, _SENTENCEPIECE_IDS)
    # Merges make runs of spaces, as in llama.cpp; a text contains no U+2581 that would match them.
    space_runs = {i for i, kind in enumerate(types) if kind == USER_DEFINED and SPACE in tokens[i]}
    types = [NORMAL if i in space_runs else kind for i, kind in enumerate(types)]
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == NORMAL and len(token) > MAX_PIECE_LENGTH:
            raise keys.error(f"tokenizer.ggml.tokens has a token of more than {MAX_PIECE_LENGTH} characters")
        if not NORMAL <= kind <= sentencepiece.BYTE or math.isnan(score):
            raise keys.error(f"tokenizer.ggml: token {token[:40]!r} has type {kind} and score {score}")
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
    template = keys.text("tokenizer.chat_template", "") or None
    return Tokenizer(runtime, names, chat_template=template, sentencepiece_model=content)


def _add_special(runtime: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the special tokens, and those that are matched before any merge."""
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    runtime.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _add_user_defined(runtime, tokens, types)


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
            raise keys.error(f"{key} is {id}, there are {rows} tokens")
        names[role] = tokens[id] if id is not None and id < len(tokens) else None
    return names


def _added_bos_eos(keys: MetadataReader, names: dict[str, str | None], add_bos: bool) -> tuple[str | None, str | None]:
    """The tokens that `encode` adds in front of a text and at its end."""
    bos = keys.flag("tokenizer.ggml.add_bos_token", add_bos)
    eos = keys.flag("tokenizer.ggml.add_eos_token", False)
    return names["bos"] if bos else None, names["eos"] if eos else None


def _strings(keys: MetadataReader, key: str) -> list[str]:
    value = keys.header.metadata.get(key)
    if not isinstance(value, Array) or not value.holds_strings or not value.count:
        raise keys.error(f"{key} must be a list of strings")
    return value.read()


def _numbers(keys: MetadataReader, key: str, count: int, default: int | None) -> list[Any]:
    value = keys.header.metadata.get(key)
    if value is None and default is not None:
        return [default] * count
    if not isinstance(value, Array) or not value.holds_numbers or value.count < count:
        raise keys.error(f"{key} must be a list of {count} numbers")
    return value.read()[:count]


def tokenizer_metadata(tokenizer: Tokenizer | None, config: ModelConfig) -> tuple[Metadata, list[str]]:
    """Return the metadata of a tokenizer, and notes about where llama.cpp tokenizes differently.

    Raises:
        TokenizerError: llama.cpp has no such tokenizer.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}, []
    if tokenizer.vocab_size > config.vocab_size:
        counts = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        raise TokenizerError(counts, "a folder as output, or the tokenizer files that belong to these weights")
    model = json.loads(tokenizer.to_json())
    build = {"byte-level": _byte_level, "sentencepiece": _sentencepiece}.get(tokenizer.tokenizer_type)
    if tokenizer.tokenizer_type == "sentencepiece" and config.model_type == "gemma4_text":
        build = _merged_pieces
    if build is None:
        kind = tokenizer.tokenizer_type
        raise TokenizerError(f"llama.cpp has no tokenizer of type {kind!r}", "byte-level or SentencePiece BPE")
    values, pieces, notes = build(tokenizer, model)
    stripped = [t["content"] for t in model["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if stripped:
        notes.append(f"llama.cpp keeps the spaces around {', '.join(stripped[:3])}, which this tokenizer removes")
    eos_count = len(_eos_ids(tokenizer, config))
    if eos_count > 3:
        notes.append(f"llama.cpp gets three of the {eos_count} end-of-text tokens")
    bos, eos = _adds_bos_eos(tokenizer)
    check_unicode(tokenizer.chat_template or "")
    return {
        **values,
        **_token_lists(model, pieces, config.vocab_size, scored=tokenizer.tokenizer_type == "sentencepiece"),
        **_special_ids(tokenizer, config),
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.ggml.add_eos_token": eos,
        **({} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}),
    }, notes


def _byte_level(tokenizer: Tokenizer, model: Mapping[str, Any]) -> tuple[Metadata, Pieces, list[str]]:
    bpe = model["model"]
    fields = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    unsupported = [name for name in fields if bpe.get(name)]
    if bpe["type"] != "BPE" or unsupported:
        raise TokenizerError(f"llama.cpp has no byte-level tokenizer with {', '.join(unsupported) or bpe['type']}")
    merges = _merges(bpe)
    if not merges:
        raise TokenizerError("llama.cpp has no byte-level tokenizer without merges")
    if any(" " in part for merge in merges for part in merge):
        raise TokenizerError("a merge of this tokenizer contains a space, which llama.cpp's list of merges can't store")
    pre, notes = find_pre_tokenizer(model)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    return values, {id: (token, 0.0, NORMAL) for token, id in bpe["vocab"].items()}, notes


def _merged_pieces(tokenizer: Tokenizer, model: Mapping[str, Any]) -> tuple[Metadata, Pieces, list[str]]:
    """The inverse of `_from_merged_pieces`."""
    bpe, merges = model["model"], _merges(model["model"])
    if tokenizer.adds_dummy_prefix or any(" " in token for token in bpe["vocab"]):
        raise TokenizerError(f"Gemma 4 in llama.cpp has {SPACE!r} for each space of a text, and no other")
    crossing = any("\n" in token and token.strip("\n") for token in bpe["vocab"])
    notes = ["llama.cpp splits texts at newlines, which some tokens contain"] if crossing else []
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_space_prefix": False,
    }
    kinds = {bpe.get("unk_token"): UNKNOWN}
    pieces = {
        id: (token, 0.0, kinds.get(token, BYTE if _BYTE_TOKEN.fullmatch(token) else NORMAL))
        for token, id in bpe["vocab"].items()
    }
    return values, pieces, notes


def _sentencepiece(tokenizer: Tokenizer, model: Mapping[str, Any]) -> tuple[Metadata, Pieces, list[str]]:
    notes, extra_spaces = [], False
    pre_tokenizer = (model.get("pre_tokenizer") or {"type": None})["type"]
    if pre_tokenizer not in (None, "Metaspace", "Split"):
        raise TokenizerError(f"llama.cpp has no SentencePiece tokenizer with a pre_tokenizer {pre_tokenizer!r}")
    if pre_tokenizer == "Metaspace" and tokenizer.adds_dummy_prefix:
        notes.append("llama.cpp puts a space before every text, this tokenizer only before those without one")
    if tokenizer.sentencepiece_model is None:
        pieces = _pieces_from_merges(model)
    else:
        proto = sentencepiece.parse(tokenizer.sentencepiece_model, "tokenizer.model")
        pieces = {id: (piece.piece, piece.score, piece.type) for id, piece in enumerate(proto.pieces)}
        _check_equal(model["model"]["vocab"], pieces)
        extra_spaces = proto.normalizer_spec.remove_extra_whitespaces
        if extra_spaces:
            notes.append("llama.cpp keeps repeated spaces, which this tokenizer replaces by one")
    if sum(kind == BYTE for _, _, kind in pieces.values()) != 256:
        raise TokenizerError("this SentencePiece tokenizer has no byte tokens, which llama.cpp requires")
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": tokenizer.adds_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": extra_spaces,
    }
    return values, pieces, notes


def _check_equal(vocabulary: Mapping[str, int], pieces: Pieces) -> None:
    """Raise TokenizerError if tokenizer.json and tokenizer.model have different pieces for an id."""
    for token, id in vocabulary.items():
        piece, _, kind = pieces.get(id, (token, 0.0, NORMAL))
        if kind == NORMAL and token not in (piece, piece.replace(SPACE, " ")):
            raise TokenizerError(f"token {id} is {token!r} in tokenizer.json and {piece!r} in tokenizer.model")


def _pieces_from_merges(model: Mapping[str, Any]) -> Pieces:
    """SentencePiece's pieces for a tokenizer.json that was converted from a SentencePiece model.

    The scores rank the pieces in the order of the merges. Raises TokenizerError if they don't imply the same merges.
    """
    bpe, normalizer = model["model"], model.get("normalizer")
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    supported = all(step["type"] == "Prepend" or step.get("pattern", {}).get("String") == " " for step in steps)
    if bpe["type"] != "BPE" or not supported:
        raise TokenizerError("this tokenizer was not converted from a SentencePiece model", "its tokenizer.model")
    vocabulary = bpe["vocab"]
    special = {token["content"] for token in model["added_tokens"]} | {bpe.get("unk_token")}
    plain = [token for token in vocabulary if token not in special and not _BYTE_TOKEN.fullmatch(token)]
    merges = _merges(bpe)
    scores = dict.fromkeys(plain, _PAD_SCORE) | _merge_scores(["".join(merge) for merge in merges])
    if set(merges) != _all_merges(scores):
        raise TokenizerError("the merges of this tokenizer don't follow from its tokens, as those of SentencePiece do")
    spaces = " " if any(" " in token for token in plain) else SPACE
    if spaces == " " and any(SPACE in token for token in plain):
        raise TokenizerError(
            f"this tokenizer has tokens with spaces and with {SPACE!r}, SentencePiece only has one kind"
        )
    pieces = {}
    for token, id in vocabulary.items():
        kind = BYTE if _BYTE_TOKEN.fullmatch(token) else UNKNOWN if token == bpe.get("unk_token") else NORMAL
        if kind == NORMAL and token in special:
            continue
        text = token.replace(" ", SPACE) if kind == NORMAL else token
        pieces[id] = (text, scores.get(token, 0.0), kind)
    return pieces


def _merges(bpe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a tokenizer.json: pairs, or strings with a space in older files."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in bpe["merges"])
    return [(left, right) for left, right in pairs]


def _all_merges(tokens: Mapping[str, float]) -> set[tuple[str, str]]:
    """All pairs of tokens that join to a token."""
    return {
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    }


def _merge_scores(merged: list[str]) -> dict[str, float]:
    """Decreasing scores for the tokens that the merges produce, in the order of the merges.

    Tokens whose merges interleave share a score; llama.cpp then merges the leftmost pair, which is right for runs of
    one character. Raises TokenizerError where other tokens would share one.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, token in enumerate(merged):
        first.setdefault(token, rank)
        last[token] = rank
    groups: list[list[str]] = []
    end = -1
    for token in sorted(first, key=lambda token: first[token]):
        if first[token] > end:
            groups.append([])
        groups[-1].append(token)
        end = max(end, last[token])
    scores: dict[str, float] = {}
    for group in groups:
        if len(group) > 1 and any(len(set(member)) > 1 for member in group):
            raise TokenizerError("the merges of this tokenizer are in an order that scores can't express")
        scores |= dict.fromkeys(group, -float(len(scores)))
    return scores


def _token_lists(model: Mapping[str, Any], pieces: Pieces, rows: int, scored: bool) -> Metadata:
    """Texts, types and scores for all rows of the embedding; added tokens as tokenizer.json defines them."""
    values = [pieces.get(id, (f"[PAD{id}]", _PAD_SCORE, UNUSED)) for id in range(rows)]
    for token in model["added_tokens"]:
        _, score, kind = values[token["id"]]
        if kind != UNKNOWN:
            kind = CONTROL if token["special"] else USER_DEFINED
        values[token["id"]] = (token["content"], _ADDED_SCORE if token["id"] not in pieces else score, kind)
    texts, scores, types = (list(column) for column in zip(*values, strict=True))
    lists = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    return lists | ({"tokenizer.ggml.scores": scores} if scored else {})


def _special_ids(tokenizer: Tokenizer, config: ModelConfig) -> Metadata:
    """Ids of the special tokens, with up to three end-of-text tokens as eos, eot and eom."""
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else config.pad_token_id
    ids = {"bos": bos, "padding": pad, "unknown": tokenizer.unk_token_id}
    ids |= dict(zip(("eos", "eot", "eom"), _eos_ids(tokenizer, config), strict=False))
    return {
        f"tokenizer.ggml.{role}_token_id": id
        for role, id in ids.items()
        if id is not None and 0 <= id < config.vocab_size
    }


def _eos_ids(tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """The end-of-text tokens: the tokenizer's, then those of the model."""
    ids = token_id_list(config.eos_token_id)
    if tokenizer.eos_token_id is None:
        return ids
    return [tokenizer.eos_token_id, *(id for id in ids if id != tokenizer.eos_token_id)]


def _adds_bos_eos(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether `encode` adds BOS in front and EOS at the end. Raises TokenizerError for other tokens."""
    without = tokenizer.encode("a", add_special_tokens=False)
    encoded = tokenizer.encode("a")
    for bos, eos in itertools.product((False, True), repeat=2):
        front, back = [tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos
        if encoded == [*front, *without, *back]:
            return bos, eos
    raise TokenizerError("this tokenizer adds other tokens to a text than BOS and EOS, which llama.cpp doesn't support")
