"""llama2.c's tokenizer files: the pieces and scores of a SentencePiece BPE model, without its settings.

Format (tokenizer.py and run.c of https://github.com/karpathy/llama2.c): the length of the longest piece, uint32,
then for each id a float32 score, a uint32 length and UTF-8 bytes. The number of ids is in the model's header only.
Spaces are written as themselves, and line ends are put around the texts of ids 1 and 2. run.c always puts a space
in front of a text, takes ids 0, 1, 2 for unknown, begin and end, and ids from 3 for the 256 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from mlxlm.tokenizer import Tokenizer, sentencepiece
from mlxlm.tokenizer.sentencepiece import SPACE
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError, os_errors_as

_LARGEST = 1_000_000  # ids; the largest vocabularies in use have about 260,000
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIXED = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]  # what run.c takes the first ids for
# run.c merges pieces with a score above this one, so that no text becomes a piece that has it.
_NEVER = -1e10


def find_tokenizer(model: Path, vocab_size: int) -> Path:
    """The tokenizer of a llama2.c model, in its folder: `NAME.tokenizer.bin`, `tok4096.bin` (as llama2.c calls
    those it trains, by vocabulary size) or `tokenizer.bin`. Raises TokenizerError if there is none."""
    names = (f"{model.stem}.tokenizer.bin", f"tok{vocab_size}.bin", "tokenizer.bin")
    for name in names:
        if model.with_name(name).is_file():
            return model.with_name(name)
    raise MissingTokenizerError(f"no tokenizer beside {model}", " or ".join(names))


def read_tokenizer(path: Path | str, vocab_size: int) -> Tokenizer:
    """The tokenizer in a llama2.c file, with the ids of SentencePiece's own encoder (see `sentencepiece.convert`).

    Raises TokenizerError naming the file and the piece that is wrong.
    """
    path = Path(path)
    if vocab_size > _LARGEST:
        raise TokenizerError(f"the model of {path} has {vocab_size} tokens", f"a vocabulary of at most {_LARGEST}")
    with os_errors_as(TokenizerError, "read", path):
        size = path.stat().st_size
        if size > 4 + vocab_size * (8 + 4 * sentencepiece.MAX_PIECE_LENGTH):
            raise TokenizerError(f"{path} has {size} bytes, too many for the {vocab_size} tokens of the model")
        data = path.read_bytes()
    pieces = _pieces(data, path, vocab_size)
    _check_fixed([text for text, _ in pieces], str(path), "a tokenizer of llama2.c")
    proto = _proto(pieces).SerializeToString()
    model = sentencepiece.parse(proto, str(path))
    runtime = sentencepiece.convert(model)
    return Tokenizer(runtime, sentencepiece.special_names(model), sentencepiece_model=proto)


def tokenizer_bytes(tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """The content of `tokenizer.bin` for a model with `vocab_size` rows; ids without a token get one that no text
    becomes.

    Raises TokenizerError if run.c would encode text in another way than `tokenizer`.
    """
    hint = "GGUF, or a folder as output"
    if tokenizer.sentencepiece_model is None:
        what = (
            "has no tokenizer.model"
            if tokenizer.tokenizer_type == "sentencepiece"
            else f"is {tokenizer.tokenizer_type}"
        )
        raise TokenizerError(f"llama2.c has SentencePiece tokenizers as Llama 2's, this one {what}", hint)
    model = sentencepiece.parse(tokenizer.sentencepiece_model, "tokenizer.model")
    _check_fixed([piece.piece for piece in model.pieces], "this tokenizer", hint)
    rules = model.normalizer_spec
    if not rules.add_dummy_prefix or rules.remove_extra_whitespaces:
        what = "removes spaces, run.c keeps them" if rules.add_dummy_prefix else "puts no space first, run.c does"
        raise TokenizerError(f"this tokenizer {what}", hint)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    added = {token["id"]: token["content"] for token in json.loads(tokenizer.to_json())["added_tokens"]}
    entries = []
    for i in range(vocab_size):
        piece = model.pieces[i] if i < len(model.pieces) else None
        if piece is not None and (i < len(_FIXED) or piece.type == sentencepiece.NORMAL):
            text, score = piece.piece, piece.score
        else:
            text, score = added.get(i, f"<unused{i}>"), _NEVER
        text = f"\n{text}\n" if i in (1, 2) else text.replace(SPACE, " ")
        entries.append((score, text.encode("utf-8")))
    parts = [struct.pack("<I", max(len(text) for _, text in entries))]
    parts += [struct.pack("<fI", score, len(text)) + text for score, text in entries]
    return b"".join(parts)


def _pieces(data: bytes, path: Path, vocab_size: int) -> list[tuple[str, float]]:
    """Texts and scores, as SentencePiece has them."""
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
        if not 0 < length <= longest or offset + length > len(data):
            raise TokenizerError(
                f"{path}: token {i} is {length} bytes long, max_token_length is {longest}, "
                f"{len(data) - offset} bytes are left"
            )
        try:
            text = data[offset : offset + length].decode("utf-8")
        except UnicodeDecodeError:
            raise TokenizerError(f"{path}: token {i} is not UTF-8 text") from None
        offset += length
        if i in (1, 2):
            text = text.removeprefix("\n").removesuffix("\n")
        pieces.append((text.replace(" ", SPACE), score))
    if offset != len(data):
        raise TokenizerError(f"{path} goes on after token {vocab_size - 1}, the last of the model", hint)
    return pieces


def _check_fixed(texts: list[str], name: str, hint: str) -> None:
    for i, text in enumerate(_FIXED):
        if i >= len(texts) or texts[i] != text:
            found = repr(texts[i]) if i < len(texts) else "missing"
            raise TokenizerError(f"{name}: token {i} is {found}, run.c takes it for {text!r}", hint)


def _proto(pieces: list[tuple[str, float]]) -> Any:
    """SentencePiece's own form, with the settings that run.c takes for granted."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    for i, (text, score) in enumerate(pieces):
        if i == 0:
            kind = sentencepiece.UNKNOWN
        elif len(_SPECIAL) <= i < len(_FIXED):
            kind = sentencepiece.BYTE
        elif i < len(_SPECIAL) or score <= _NEVER:
            kind = sentencepiece.CONTROL
        else:
            kind = sentencepiece.NORMAL
        proto.pieces.add(piece=text, score=score, type=kind)
    spec, rules = proto.trainer_spec, proto.normalizer_spec
    spec.model_type, spec.vocab_size, spec.byte_fallback = sentencepiece.BPE, len(pieces), True
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 0, 1, 2, -1
    rules.name = "identity"
    rules.add_dummy_prefix, rules.remove_extra_whitespaces, rules.escape_whitespaces = True, False, True
    return proto
