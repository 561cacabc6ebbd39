"""tiktoken's vocabulary files, `tokenizer.model` of Llama 3 and `*.tiktoken`: byte-level BPE.

Each line has a token in Base64 and its rank, which is its id. tiktoken merges the adjacent pair that forms the token
with the lowest rank, leftmost first (https://github.com/openai/tiktoken). How text is split before, and the special
tokens, are not in the file but in the program of each model; their number of ranks tells which it is.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mlxlm.tokenizer.detokenizer import CHARACTER_OF_BYTE
from mlxlm.tokenizer.tokenizer import bos_eos_processor
from mlxlm.tokenizer.word_cache import WORD_PATTERN
from mlxlm.utils.errors import TokenizerError

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d{1,9}\r?\n")
_MAX_TOKEN = 512  # bytes: the time of `_merges` grows with the square; known vocabularies have up to 128


@dataclass(frozen=True)
class _Program:
    """What a model's program adds to the ranks."""

    special_tokens: tuple[str, ...]  # their ids follow the ranks
    pattern: str = WORD_PATTERN
    bos: str | None = None
    nfc: bool = False


def _reserved(start: int, stop: int) -> tuple[str, ...]:
    return tuple(f"<|reserved_special_token_{i}|>" for i in range(start, stop))


# The names of Llama 3.1, which gave some of Llama 3's reserved tokens a meaning.
LLAMA3 = _Program(
    (
        "<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 2), "<|finetune_right_pad_id|>", *_reserved(2, 3),
        "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_reserved(3, 248),
    ),
    bos="<|begin_of_text|>",
)  # fmt: skip
QWEN = _Program(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    pattern=WORD_PATTERN.replace("{1,3}", ""),
    nfc=True,
)
PROGRAMS = {128_000: LLAMA3, 151_643: QWEN}  # by the number of ranks


def is_tiktoken(data: bytes) -> bool:
    """Whether the content of a file begins with a line of tiktoken's format, which SentencePiece's can't."""
    return _LINE.match(data) is not None


def convert(data: bytes, name: str) -> tokenizers.Tokenizer:
    """Convert a vocabulary to a tokenizer with tiktoken's ids.

    Args:
        data: The content of the file.
        name: Name of the file, for error messages.

    Raises:
        TokenizerError: It is malformed, or of a model whose program isn't known.
    """
    tokens = _parse(data, name)
    if (program := PROGRAMS.get(len(tokens))) is None:
        counts = " or ".join(map(str, PROGRAMS))
        problem = f"{name} has {len(tokens)} tokens, and doesn't say how text is split"
        raise TokenizerError(problem, f"the model's tokenizer.json, or a vocabulary of {counts} tokens")
    texts = ["".join(map(CHARACTER_OF_BYTE.__getitem__, token)) for token in tokens]
    vocabulary = {text: rank for rank, text in enumerate(texts)}
    runtime = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(texts, vocabulary), ignore_merges=True))
    runtime.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in program.special_tokens])
    if program.nfc:
        runtime.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(program.pattern), "isolated")
    runtime.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    runtime.decoder = decoders.ByteLevel()
    if program.bos:
        runtime.post_processor = bos_eos_processor(runtime, program.bos, None)
    return runtime


def _parse(data: bytes, name: str) -> list[bytes]:
    """The tokens in the order of their ranks, which are all numbers from 0 up."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{name}: line {number} is not a token in Base64 and its rank") from None
        if not 0 < len(token) <= _MAX_TOKEN or token in ranks:
            problem = "occurs twice" if token in ranks else f"has {len(token)} bytes, 1 to {_MAX_TOKEN} are possible"
            raise TokenizerError(f"{name}: the token in line {number} {problem}")
        ranks[token] = value
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise TokenizerError(f"{name}: the ranks are not all numbers from 0 to {len(tokens) - 1}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{name} has no token for the byte {missing[0]}")
    return tokens


def _merges(texts: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Each split of a token in two, by the token's rank; the longest left part first, which extends runs from the left.

    The ids could only differ from tiktoken's if two splits of one token overlap in a text.
    """
    return [
        (text[:cut], text[cut:])
        for text in texts
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
