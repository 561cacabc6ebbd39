"""llama2.c's tokenizer files: the pieces and scores of a SentencePiece BPE model, without its settings.

Format (tokenizer.py and run.c of https://github.com/karpathy/llama2.c): the length of the longest piece, uint32,
then for each id a float32 score, a uint32 length and UTF-8 bytes. The number of ids is in the model's header only.
Spaces are stored as spaces, and the texts of ids 1 and 2 are between line breaks. run.c always puts a space in front
of a text, takes ids 0, 1, 2 for unknown, begin and end, and ids from 3 for the 256 bytes.
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

_MAX_TOKENS = 1_000_000  # the largest vocabularies in use have about 260,000
_FIRST_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]  # what run.c expects
# run.c only merges pieces with a score above this one.
_NEVER_MERGED = -1e10


def find_tokenizer(model: Path, vocab_size: int) -> Path:
    """Find the tokenizer file beside a llama2.c model.

    Tries `NAME.tokenizer.bin`, `tok4096.bin` (llama2.c's name for tokenizers that it trains, by vocabulary size) and
    `tokenizer.bin`, in this order.

    Raises:
        MissingTokenizerError: There is none.
    """
    names = (f"{model.stem}.tokenizer.bin", f"tok{vocab_size}.bin", "tokenizer.bin")
    for name in names:
        if model.with_name(name).is_file():
            return model.with_name(name)
    raise MissingTokenizerError(f"no tokenizer beside {model}", " or ".join(names))


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
    if not rules.add_dummy_prefix or rules.remove_extra_whitespaces:
        if rules.add_dummy_prefix:
            raise TokenizerError("this tokenizer removes repeated spaces, run.c keeps them", hint)
        raise TokenizerError("this tokenizer doesn't put a space in front of a text, run.c does", hint)
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
