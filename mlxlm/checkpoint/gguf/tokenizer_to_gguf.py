"""A tokenizer as llama.cpp's metadata."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from mlxlm.checkpoint.gguf.config_to_gguf import ARRAY, BOOL, FLOAT, INT, STRING
from mlxlm.checkpoint.gguf.pre_tokenizers import find_pre_tokenizer
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer.sentencepiece import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import TokenizerError

_INT32 = 5  # the format's number
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_ADDED_SCORE, _PAD_SCORE = -1000.0, -10000.0  # as llama.cpp's converters give them

Metadata = dict[str, tuple[int, Any]]
Pieces = dict[int, tuple[str, float, int]]  # id -> text, score, type


def tokenizer_metadata(tokenizer: Tokenizer | None, config: ModelConfig) -> tuple[Metadata, list[str]]:
    """Keys -> the format's type and the value, an array's being (type of its elements, list); and what llama.cpp
    will do otherwise. None: a file without a tokenizer.

    Raises TokenizerError for a tokenizer that llama.cpp would give other ids.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": (STRING, "none")}, []
    if tokenizer.vocab_size > config.vocab_size:
        counts = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        raise TokenizerError(counts, "a folder as output, or the tokenizer files that belong to these weights")
    model = json.loads(tokenizer.to_json())
    build = {"byte-level": _byte_level, "sentencepiece": _sentencepiece}.get(tokenizer.tokenizer_type)
    if build is None:
        kind = tokenizer.tokenizer_type
        raise TokenizerError(f"llama.cpp has no tokenizer of the kind {kind!r}", "byte-level or SentencePiece BPE")
    own, pieces, notes = build(tokenizer, model)
    stripped = [t["content"] for t in model["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if stripped:
        notes.append(f"llama.cpp keeps the spaces around {', '.join(stripped[:3])}, which this tokenizer takes in")
    ends = len(_ends(tokenizer, config))
    if ends > 3:
        notes.append(f"llama.cpp gets three of the {ends} tokens that end a text")
    bos, eos = _around(tokenizer)
    check_unicode(tokenizer.chat_template or "")
    return {
        **own,
        **_lists(model, pieces, config.vocab_size, scored=tokenizer.tokenizer_type == "sentencepiece"),
        **_ids(tokenizer, config),
        "tokenizer.ggml.add_bos_token": (BOOL, bos),
        "tokenizer.ggml.add_eos_token": (BOOL, eos),
        **({} if tokenizer.chat_template is None else {"tokenizer.chat_template": (STRING, tokenizer.chat_template)}),
    }, notes


def _byte_level(tokenizer: Tokenizer, model: Mapping[str, Any]) -> tuple[Metadata, Pieces, list[str]]:
    bpe = model["model"]
    fields = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    odd = [name for name in fields if bpe.get(name)]
    if bpe["type"] != "BPE" or odd:
        raise TokenizerError(f"llama.cpp has no byte-level tokenizer with {', '.join(odd) or bpe['type']}")
    merges = _merges(bpe)
    if any(" " in part for merge in merges for part in merge):
        raise TokenizerError("a merge of this tokenizer has a space in it, which llama.cpp's list of merges can't hold")
    pre, notes = find_pre_tokenizer(model)
    own = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [" ".join(merge) for merge in merges])),
    }
    return own, {id: (token, 0.0, NORMAL) for token, id in bpe["vocab"].items()}, notes


def _sentencepiece(tokenizer: Tokenizer, model: Mapping[str, Any]) -> tuple[Metadata, Pieces, list[str]]:
    notes, extra_spaces = [], False
    cuts = model.get("pre_tokenizer") or {"type": None}
    if cuts["type"] not in (None, "Metaspace", "Split"):
        raise TokenizerError(f"llama.cpp has no SentencePiece tokenizer with a pre_tokenizer {cuts['type']!r}")
    if cuts["type"] == "Metaspace" and tokenizer.adds_dummy_prefix:
        notes.append("llama.cpp puts a space before each text, this tokenizer only before one that begins with none")
    if tokenizer.sentencepiece_model is None:
        pieces = _pieces(model)
    else:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.sentencepiece_model)
        pieces = {id: (piece.piece, piece.score, piece.type) for id, piece in enumerate(proto.pieces)}
        _check_equal(model["model"]["vocab"], pieces)
        extra_spaces = proto.normalizer_spec.remove_extra_whitespaces
        if extra_spaces:
            notes.append("llama.cpp keeps repeated spaces, of which this tokenizer makes one")
    if sum(kind == BYTE for _, _, kind in pieces.values()) != 256:
        raise TokenizerError("this SentencePiece tokenizer has no byte tokens, without which llama.cpp stops")
    own = {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.add_space_prefix": (BOOL, tokenizer.adds_dummy_prefix),
        "tokenizer.ggml.remove_extra_whitespaces": (BOOL, extra_spaces),
    }
    return own, pieces, notes


def _check_equal(vocabulary: Mapping[str, int], pieces: Pieces) -> None:
    """Raise TokenizerError if tokenizer.json and tokenizer.model give an id to different pieces."""
    for token, id in vocabulary.items():
        piece, _, kind = pieces.get(id, (token, 0.0, NORMAL))
        if kind == NORMAL and token not in (piece, piece.replace(SPACE, " ")):
            raise TokenizerError(f"token {id} is {token!r} in tokenizer.json and {piece!r} in tokenizer.model")


def _pieces(model: Mapping[str, Any]) -> Pieces:
    """SentencePiece's pieces for a tokenizer.json that was made of a SentencePiece model: scores that rank as its
    merges do. Raises TokenizerError if they would not be the same merges."""
    bpe, normalizer = model["model"], model.get("normalizer")
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    known = all(step["type"] == "Prepend" or step.get("pattern", {}).get("String") == " " for step in steps)
    if bpe["type"] != "BPE" or not known:
        raise TokenizerError("this tokenizer is not made of a SentencePiece model as Llama's is", "tokenizer.model")
    vocabulary = bpe["vocab"]
    special = {token["content"] for token in model["added_tokens"]} | {bpe.get("unk_token")}
    plain = [token for token in vocabulary if token not in special and not _BYTE_TOKEN.fullmatch(token)]
    merges = _merges(bpe)
    scores = dict.fromkeys(plain, _PAD_SCORE) | _scores(["".join(merge) for merge in merges])
    if set(merges) != _cuts(scores):
        raise TokenizerError("the merges of this tokenizer don't follow from its tokens, as SentencePiece's do")
    spaces = " " if any(" " in token for token in plain) else SPACE
    if spaces == " " and any(SPACE in token for token in plain):
        raise TokenizerError(f"this tokenizer has tokens with spaces and with {SPACE!r}, SentencePiece has one of them")
    pieces = {}
    for token, id in vocabulary.items():
        kind = BYTE if _BYTE_TOKEN.fullmatch(token) else UNKNOWN if token == bpe.get("unk_token") else NORMAL
        if kind == NORMAL and token in special:
            continue
        text = token.replace(" ", SPACE) if kind == NORMAL else token
        pieces[id] = (text, scores.get(token, 0.0), kind)
    return pieces


def _merges(bpe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A tokenizer.json has pairs, or in older ones two words in one string."""
    return [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in bpe["merges"]]


def _cuts(tokens: Mapping[str, float]) -> set[tuple[str, str]]:
    """Each way to make a token of two others."""
    return {
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    }


def _scores(made: list[str]) -> dict[str, float]:
    """Scores that fall in the order in which `made` names the tokens of the merges. Tokens whose merges lie
    between each other's share one: llama.cpp then takes the leftmost, as runs of one character ask for.

    Raises TokenizerError where others share one.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, token in enumerate(made):
        first.setdefault(token, rank)
        last[token] = rank
    scores: dict[str, float] = {}
    group, end = [], -1
    for token in [*sorted(first, key=first.__getitem__), None]:
        if token is None or first[token] > end:
            if len(group) > 1 and any(len(set(member)) > 1 for member in group):
                raise TokenizerError("the merges of this tokenizer are in an order that scores can't have")
            scores |= dict.fromkeys(group, -float(len(scores)))
            group = []
        if token is not None:
            group.append(token)
            end = max(end, last[token])
    return scores


def _lists(model: Mapping[str, Any], pieces: Pieces, rows: int, scored: bool) -> Metadata:
    """Texts, types and scores for all rows of the embedding; added tokens are as tokenizer.json says."""
    values = [pieces.get(id, (f"[PAD{id}]", _PAD_SCORE, UNUSED)) for id in range(rows)]
    for token in model["added_tokens"]:
        _, score, kind = values[token["id"]]
        if kind != UNKNOWN:
            kind = CONTROL if token["special"] else USER_DEFINED
        values[token["id"]] = (token["content"], _ADDED_SCORE if token["id"] not in pieces else score, kind)
    texts, scores, types = (list(column) for column in zip(*values, strict=True))
    lists = {
        "tokenizer.ggml.tokens": (ARRAY, (STRING, texts)),
        "tokenizer.ggml.token_type": (ARRAY, (_INT32, types)),
    }
    return lists | ({"tokenizer.ggml.scores": (ARRAY, (FLOAT, scores))} if scored else {})


def _ids(tokenizer: Tokenizer, config: ModelConfig) -> Metadata:
    """Ids of the special tokens. All that end a text are among them, as far as there is room: the tokenizer's own
    first, then those of the model."""
    ends = _ends(tokenizer, config)
    bos = tokenizer.bos_id if tokenizer.bos_id is not None else config.bos_token_id
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else config.pad_token_id
    ids = {"bos": bos, "padding": pad, "unknown": tokenizer.unk_id}
    ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    return {
        f"tokenizer.ggml.{role}_token_id": (INT, id)
        for role, id in ids.items()
        if id is not None and 0 <= id < config.vocab_size
    }


def _ends(tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """The tokens that end a text."""
    ends = config.eos_token_id
    ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    own = tokenizer.eos_id
    return ends if own is None else [own, *(id for id in ends if id != own)]


def _around(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether `encode` puts BOS in front and EOS at the end; raises TokenizerError for anything else."""
    inside = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    for bos, eos in itertools.product((False, True), repeat=2):
        front, back = [tokenizer.bos_id] * bos, [tokenizer.eos_id] * eos
        if whole == [*front, *inside, *back]:
            return bos, eos
    raise TokenizerError("this tokenizer puts other tokens around a text than BOS and EOS, llama.cpp knows no others")
