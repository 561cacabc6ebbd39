"""Tokenizer training: byte-level BPE (as in GPT-2 and Llama 3) or SentencePiece BPE (as in Llama 2)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from mlxlm.tokenizer import sentencepiece
from mlxlm.tokenizer.tokenizer import Tokenizer, bos_eos_processor, check_unicode
from mlxlm.tokenizer.word_cache import WORD_PATTERN
from mlxlm.utils.errors import TokenizerError

TOKENIZER_TYPES = ("byte-level", "sentencepiece")
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD = "<|pad|>"
BYTE_LEVEL_SPECIAL_TOKENS = {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "pad": PAD}
SENTENCEPIECE_SPECIAL_TOKENS = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": PAD}

# SentencePiece keeps a sample of this many lines in memory, about 200 MB of prose. It skips lines that are longer than
# its limit in bytes, so that they are split before.
SAMPLE_LINES = 1_000_000
LINE_CHARACTERS = 1024
_LINE_PART = re.compile(rf".{{1,{LINE_CHARACTERS}}}(?=[ ]|$)|.{{1,{LINE_CHARACTERS}}}", re.DOTALL)
_UNTRAINABLE = dict.fromkeys(map(ord, "\0\u2585" + sentencepiece.SPACE))

_BYTE_LEVEL_MIN_SIZE = 256 + len(BYTE_LEVEL_SPECIAL_TOKENS) + len(CHAT_TOKENS)
MAX_VOCAB_SIZE = 1_000_000  # known vocabularies have up to about 260,000 tokens


def train(
    texts: Iterable[str], vocab_size: int, tokenizer_type: str = "byte-level", *, exact: bool = True
) -> Tokenizer:
    """Train a tokenizer. The same texts give the same tokenizer.

    Special tokens are "<|begin_of_text|>", "<|end_of_text|>" (byte-level) or "<unk>", "<s>", "</s>" (SentencePiece),
    and for both "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>". `encode` adds BOS.

    Args:
        texts: Training texts. Memory grows with the number of different words (byte-level); SentencePiece uses a
            random sample of a million lines.
        vocab_size: Number of tokens, including special tokens.
        tokenizer_type: "byte-level" or "sentencepiece".
        exact: Raise an error if the text is too short for `vocab_size` tokens, else train fewer.

    Raises:
        TokenizerError: The type is unknown, there is no text, or the vocabulary is smaller than bytes and special
            tokens or, if `exact`, larger than the text supports; the message names a size that works.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise TokenizerError(f"a vocabulary of {vocab_size} is too large", f"{MAX_VOCAB_SIZE} or less")
    if tokenizer_type not in TOKENIZER_TYPES:
        raise TokenizerError(f"unknown tokenizer type: {tokenizer_type}", " or ".join(TOKENIZER_TYPES))
    tokenizer = (_train_byte_level if tokenizer_type == "byte-level" else _train_sentencepiece)(texts, vocab_size)
    if exact and (supported := tokenizer.vocab_size) < vocab_size:
        raise TokenizerError(
            f"a vocabulary of {vocab_size} is larger than this text supports, which is {supported}",
            f"a vocabulary size of {supported} or less, or more text",
        )
    return tokenizer


def truncate(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that `train` gives for the same text and fewer tokens.

    Byte-level BPE adds one token after another, whatever the vocabulary size, so a smaller vocabulary is the beginning
    of a larger one.

    Args:
        tokenizer: A byte-level tokenizer, made by `train`.
        vocab_size: Up to that of `tokenizer`.

    Raises:
        TokenizerError: The vocabulary is smaller than bytes and special tokens.
    """
    check_byte_level_size(vocab_size)
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    ids, merges = model["vocab"], []
    for first, second in model["merges"] if vocab_size > _BYTE_LEVEL_MIN_SIZE else []:
        merges.append([first, second])
        if ids[first + second] == vocab_size - 1:
            break
    vocabulary = {token: id for token, id in ids.items() if id < vocab_size}
    content["model"] = {**model, "vocab": vocabulary, "merges": merges}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), BYTE_LEVEL_SPECIAL_TOKENS)


def check_byte_level_size(vocab_size: int) -> None:
    """Raise TokenizerError if a byte-level vocabulary is smaller than bytes and special tokens."""
    _check_min_size(vocab_size, _BYTE_LEVEL_MIN_SIZE)


def _train_byte_level(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    special = [*BYTE_LEVEL_SPECIAL_TOKENS.values(), *CHAT_TOKENS]
    check_byte_level_size(vocab_size)
    runtime = tokenizers.Tokenizer(models.BPE())
    runtime.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    runtime.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once would only memorize its word
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    runtime.train_from_iterator(_non_empty(texts), trainer)
    runtime.post_processor = bos_eos_processor(runtime, BYTE_LEVEL_SPECIAL_TOKENS["bos"], None)
    return Tokenizer(runtime, BYTE_LEVEL_SPECIAL_TOKENS)


def _train_sentencepiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    import sentencepiece as spm

    _check_min_size(vocab_size, 256 + len(SENTENCEPIECE_SPECIAL_TOKENS) + len(CHAT_TOKENS) + 1)
    output = io.BytesIO()
    spm.set_random_generator_seed(0)
    failures: list[BaseException] = []
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_record_errors(failures, _split_lines(_non_empty(texts))),
            model_writer=output,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            input_sentence_size=SAMPLE_LINES,
            max_sentence_length=4 * LINE_CHARACTERS,
            pad_id=3,
            pad_piece=PAD,
            control_symbols=list(CHAT_TOKENS),
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        if too_small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            _check_min_size(vocab_size, int(too_small[1]), "bytes, special tokens and this text's characters")
        problem = " ".join(str(error).split())
        raise TokenizerError(f"SentencePiece cannot train on this text: {problem}") from error
    model = sentencepiece.parse(output.getvalue(), "the trained model")
    runtime = sentencepiece.convert(model)
    return Tokenizer(runtime, SENTENCEPIECE_SPECIAL_TOKENS, sentencepiece_model=output.getvalue())


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    """The non-empty texts. Raises TokenizerError for lone surrogates, and if all texts are blank."""
    blank = True
    for text in texts:
        check_unicode(text)
        blank = blank and (not text or text.isspace())
        if text:
            yield text
    if blank:
        raise TokenizerError("there is no text to train a tokenizer on", "files with some text")


def _split_lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of at most LINE_CHARACTERS, split before a space if there is one.

    SentencePiece would skip lines with NUL or U+2585 (its mark for unknown characters) and read U+2581 as a space:
    these three characters are removed, and later encoded as bytes.
    """
    for text in texts:
        for line in text.translate(_UNTRAINABLE).split("\n"):
            yield from _LINE_PART.findall(line)


def _record_errors(failures: list[BaseException], lines: Iterator[str]) -> Iterator[str]:
    """Yield `lines` and record their error, since SentencePiece only reports its text."""
    try:
        yield from lines
    except BaseException as error:
        failures.append(error)
        raise


def _check_min_size(vocab_size: int, min_size: int, content: str = "bytes and special tokens alone") -> None:
    if vocab_size < min_size:
        message = f"a vocabulary of {vocab_size} is too small: {content} need {min_size}"
        raise TokenizerError(message, f"a vocabulary size of at least {min_size}")
