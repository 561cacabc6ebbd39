"""SentencePiece BPE models: parsed and converted to a `tokenizers.Tokenizer` with the same ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mlxlm.tokenizer.tokenizer import bos_eos_processor
from mlxlm.tokenizer.word_cache import word_pattern
from mlxlm.utils.errors import TokenizerError

SPACE = "\u2581"  # SentencePiece's character for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # ModelProto.SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType
MAX_PIECE_LENGTH = 512  # characters: the time of `_merges` is quadratic in them; known models have up to 48


def parse(data: bytes, name: str) -> Any:
    """Parse a ModelProto.

    Args:
        data: The content of the file.
        name: Name of the file, for error messages.

    Raises:
        TokenizerError: It isn't a BPE model that `convert` can reproduce exactly.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise TokenizerError(f"{name} is not a SentencePiece model") from error
    if not model.pieces:
        raise TokenizerError(f"{name} is not a SentencePiece model: it has no pieces")
    for i, piece in enumerate(model.pieces):
        if not isinstance(piece.piece, str):  # protobuf returns invalid UTF-8 as bytes
            raise TokenizerError(f"{name}: piece {i} is not UTF-8 text")
    if not model.HasField("normalizer_spec"):  # the last field; its defaults would change text
        raise TokenizerError(f"{name} is truncated: it has no normalizer_spec")
    unsupported = None
    if model.trainer_spec.model_type != BPE:
        unsupported = "is not BPE"
    elif model.normalizer_spec.precompiled_charsmap:
        unsupported = f"normalizes text ({model.normalizer_spec.name or 'custom rules'})"
    elif any(piece.type in (USER_DEFINED, UNUSED) for piece in model.pieces):
        unsupported = "has user-defined or unused pieces"
    elif len({piece.piece for piece in model.pieces}) != len(model.pieces):
        unsupported = "has a piece twice"
    elif any(len(piece.piece) > MAX_PIECE_LENGTH for piece in model.pieces):
        unsupported = f"has a piece of more than {MAX_PIECE_LENGTH} characters"
    if unsupported:
        raise TokenizerError(f"{name}: this SentencePiece model {unsupported}", "the model's tokenizer.json")
    return model


def build(pieces: Iterable[tuple[str, float, int]], ids: Mapping[str, int | None], **rules: bool) -> Any:
    """Build the ModelProto of a BPE model.

    Args:
        pieces: Text, score and type of each piece.
        ids: The id of each special token by role ("bos", "eos", "pad", "unk").
        rules: Fields of NormalizerSpec, such as `add_dummy_prefix`.
    """
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.vocab_size = BPE, len(model.pieces)
    spec.byte_fallback = any(piece.type == BYTE for piece in model.pieces)
    for role, id in ids.items():
        setattr(spec, f"{role}_id", -1 if id is None else id)
        if id is not None:
            setattr(spec, f"{role}_piece", model.pieces[id].piece)
    model.normalizer_spec.name = "identity"
    for name, value in rules.items():
        setattr(model.normalizer_spec, name, value)
    return model


def special_names(model: Any) -> dict[str, str]:
    """Texts of the special tokens by role ("bos", "eos", "pad", "unk")."""
    spec = model.trainer_spec
    ids = {"bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id, "unk": spec.unk_id}
    return {role: model.pieces[i].piece for role, i in ids.items() if 0 <= i < len(model.pieces)}


def convert(model: Any, *, add_bos: bool = True, add_eos: bool = False) -> tokenizers.Tokenizer:
    """Convert a model from `parse` to a tokenizer with the ids of SentencePiece's encoder.

    SentencePiece merges the adjacent pair that forms the piece with the best score, leftmost first. Here, each split of
    a piece in two is a merge, ranked by the score of the piece. Between equal scores (Llama 2's runs of spaces) the
    longest left part has precedence, which extends a run from its left end, as "leftmost first" does. The ids could
    only differ if two splits of one piece overlap in a text, or if pieces other than runs of one character have equal
    scores.

    A model that changes nothing (identity, no dummy prefix) keeps spaces, so that a literal U+2581 is encoded as bytes
    and decoded unchanged; SentencePiece decodes it as a space. With a dummy prefix (Llama 2) the ids are those of
    SentencePiece for every text, and a literal U+2581 becomes a space.

    Args:
        model: The ModelProto.
        add_bos: Encode BOS before a text.
        add_eos: Encode EOS after a text.
    """
    rules = model.normalizer_spec
    byte_fallback = model.trainer_spec.byte_fallback
    lossless = byte_fallback and not (rules.add_dummy_prefix or rules.remove_extra_whitespaces)
    space = " " if lossless else SPACE
    texts = [p.piece.replace(SPACE, space) if p.type == NORMAL else p.piece for p in model.pieces]
    mergeable = {text: p.score for text, p in zip(texts, model.pieces, strict=True) if p.type == NORMAL}
    names = special_names(model)
    runtime = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=_merges(mergeable),
            unk_token=names.get("unk"),
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    special = [p.piece for p in model.pieces if p.type in (CONTROL, UNKNOWN)]
    runtime.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if not lossless:
        runtime.normalizer = _normalizer(rules)
    if byte_fallback and not any(_crosses_words(text, space) for text in mergeable):
        # No piece crosses words or lines, so that splitting there can't change the ids. Words are then cached, which
        # makes encoding several times faster. (Without byte fallback, adjacent unknown characters are one token, even
        # across words.)
        runtime.pre_tokenizer = pre_tokenizers.Split(Regex(word_pattern(space)), "isolated")
    steps = [decoders.ByteFallback(), decoders.Fuse()]
    if not lossless:
        steps.insert(0, decoders.Replace(SPACE, " "))
    if rules.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    runtime.decoder = decoders.Sequence(steps)
    bos, eos = names.get("bos") if add_bos else None, names.get("eos") if add_eos else None
    if bos or eos:
        runtime.post_processor = bos_eos_processor(runtime, bos, eos)
    return runtime


def _merges(mergeable: dict[str, float]) -> list[tuple[str, str]]:
    ranked = [
        (-score, -cut, cut - len(text), text[:cut], text[cut:])
        for text, score in mergeable.items()
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _crosses_words(text: str, space: str) -> bool:
    return "\n" in text or space in text.lstrip(space)


def _normalizer(rules: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)
