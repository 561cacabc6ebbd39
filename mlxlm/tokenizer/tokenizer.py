"""`Tokenizer`: one interface for all types of tokenizers."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from mlxlm.tokenizer.detokenizer import ByteDecoder, ByteDetokenizer, StreamingDetokenizer, WindowDetokenizer
from mlxlm.tokenizer.word_cache import WordCache, splits_at_words
from mlxlm.utils.errors import TextTooLongError, TokenizerError, os_errors_as
from mlxlm.utils.files import write_bytes

_MAX_VOCAB_SIZE = 1 << 24  # known vocabularies have up to about 260,000 tokens
_MAX_TOKEN = 1 << 16  # characters; a text of a thousand such tokens fits in memory
_CONTINUATION = "\n"  # see `_encode_texts`
_CHARACTERS_PER_TOKEN = 8  # English has about 4, runs of spaces have more
ROLES = ("bos", "eos", "pad", "unk")


class Tokenizer:
    """Encodes text to token ids and decodes ids to text.

    Args:
        runtime: The tokenizer of the tokenizers library.
        names: Texts of special tokens by role ("bos", "eos", "pad", "unk").
        chat_template: Jinja source.
        sentencepiece_model: The SentencePiece model that `runtime` was converted from, for `save`.

    Attributes:
        vocab_size: Highest id + 1, including special tokens.
        bos_token_id: Id of the BOS token, or None. The same for eos_token_id, pad_token_id and unk_token_id.
        special_tokens: Ids by text of all special tokens.
        special_token_names: Texts by role of the special tokens in the vocabulary.
        chat_template: Jinja source, or None; can be set.
        sentencepiece_model: See Args.
    """

    def __init__(
        self,
        runtime: tokenizers.Tokenizer,
        names: Mapping[str, str | None],
        *,
        chat_template: str | None = None,
        sentencepiece_model: bytes | None = None,
    ):
        # A tokenizer.json may have its model's truncation and padding.
        runtime.no_truncation()
        runtime.no_padding()
        # Whether to parse special tokens is a setting of a runtime, which can't change while another thread encodes.
        runtime.encode_special_tokens = True
        self._runtime, self._parsing_runtime = runtime, _share_vocabulary(runtime)
        vocabulary = self.vocabulary
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MAX_VOCAB_SIZE:  # callers allocate tables of this length
            raise TokenizerError(f"a token has the id {self.vocab_size - 1}", f"ids below {_MAX_VOCAB_SIZE}")
        if max(map(len, vocabulary), default=0) > _MAX_TOKEN:
            raise TokenizerError(f"a token has more than {_MAX_TOKEN} characters", "tokens of text")
        self.special_token_names = {role: name for role in ROLES if (name := names.get(role)) in vocabulary}
        ids = {role: vocabulary[name] for role, name in self.special_token_names.items()}
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = map(ids.get, ROLES)
        added = runtime.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {t.content: i for i, t in sorted(added.items()) if t.special}
        self.chat_template = chat_template
        self.sentencepiece_model = sentencepiece_model
        self._decoder = ByteDecoder.from_runtime(runtime)
        special = frozenset(self.special_tokens.values())
        self._content = _Table(self._content_bytes)
        self._text = _Table(lambda id: b"" if id in special else self._content[id])
        self._words = WordCache(self._encode_by_library) if splits_at_words(runtime) else None

    @property
    def min_vocab_size(self) -> int:
        """Smallest vocabulary of a model for this tokenizer.

        The highest id + 1 that text, `encode` and the chat template can have. Multimodal models may have further
        special tokens beyond their vocabulary.
        """
        added, template = self.encode(""), self.chat_template or ""
        unused = {id for text, id in self.special_tokens.items() if id not in added and text not in template}
        return max((id for id in self.vocabulary.values() if id not in unused), default=-1) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens by text, as tokenizer.json spells them."""
        return self._runtime.get_vocab(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer({self.tokenizer_type}, vocab_size={self.vocab_size})"

    @property
    def tokenizer_type(self) -> str:
        """The type: "byte-level", "sentencepiece" (BPE with byte fallback), or another in lower case."""
        if self._decoder is None:
            return type(self._runtime.model).__name__.lower()
        return "byte-level" if self._decoder.byte_level else "sentencepiece"

    @cached_property
    def adds_dummy_prefix(self) -> bool:
        """Whether `encode` adds a space before a text (a dummy prefix)."""
        prefix, both = self._encode([_CONTINUATION, _CONTINUATION + "a"], add_special_tokens=False, parse_special=False)
        return both[len(prefix) :] != self._encode(["a"], add_special_tokens=False, parse_special=False)[0]

    @property
    def strips_dummy_prefix(self) -> bool:
        """Whether decoding drops a space at the beginning of a text (Llama 2's dummy prefix)."""
        return self._decoder is not None and self._decoder.strip_first_space

    @property
    def has_byte_tokens(self) -> bool:
        """Whether `token_bytes` are the bytes of a token in any text; else they are its spelling in the vocabulary."""
        return self._decoder is not None

    @property
    def prefix_token_ids(self) -> list[int]:
        """The ids that `encode` adds before a text, usually BOS or nothing."""
        return list(self._special_ids_around[0])

    @cached_property
    def _special_ids_around(self) -> tuple[list[int], list[int]]:
        """The ids that `encode` adds before and after a text."""
        ids, text_ids = self._encode_by_library(["a"], True)[0], self._encode_by_library(["a"])[0]
        starts = range(len(ids) - len(text_ids) + 1)
        start = next((start for start in starts if ids[start : start + len(text_ids)] == text_ids), 0)
        return (ids[:start], ids[start + len(text_ids) :]) if text_ids else (ids, [])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of the canonical tokenizer.json, without the chat template."""
        content = json.loads(self._runtime.to_str())
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        continues: bool = False,
        max_length: int = sys.maxsize,
    ) -> list[int]:
        """Encode a text.

        Args:
            text: The text.
            add_special_tokens: Add the special tokens of the tokenizer (usually BOS), as in transformers.
            parse_special: Encode text such as "<|user|>" as the special token, as for rendered chat templates. By
                default it is ordinary text, so that data and users can't forge control tokens.
            continues: The text continues another one: without special tokens and dummy prefix.
            max_length: Stop at a text with far more tokens, whose beginning is enough to know that.

        Raises:
            TextTooLongError: The text has far more than `max_length` tokens.
            TokenizerError: The text has lone surrogates, which UTF-8 doesn't have.
        """

        def encode(part: str) -> list[int]:
            return self._encode_texts([part], [continues], add_special_tokens and not continues, parse_special)[0]

        size = _CHARACTERS_PER_TOKEN * (max_length + 1)
        while size < len(text):
            check_length(encode(text[:size]), max_length)
            size *= 2
        return encode(text)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, continues: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Encode texts in parallel (Rust threads). Special tokens in the texts are ordinary text. See `encode`."""
        return self._encode_texts(texts, continues or [False] * len(texts), add_special_tokens, parse_special=False)

    def _encode_texts(
        self, texts: Sequence[str], continues: Sequence[bool], add_special_tokens: bool, parse_special: bool
    ) -> list[list[int]]:
        if not (any(continues) and self.adds_dummy_prefix):
            return self._encode(list(texts), add_special_tokens, parse_special)
        # A line end before the text gets the dummy prefix, and its ids are dropped. Tokenizers with a dummy prefix
        # never merge a line end with the text after it.
        num_dropped = len(self._encode([_CONTINUATION], False, False)[0])
        prefixed = [_CONTINUATION + text if is_next else text for text, is_next in zip(texts, continues, strict=True)]
        encoded = self._encode(prefixed, add_special_tokens, parse_special)
        return [ids[num_dropped:] if is_next else ids for ids, is_next in zip(encoded, continues, strict=True)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids. Ids without a token (the padding of a model's vocabulary) have no text.

        Equal to transformers' decode with one exception: with byte fallback, one invalid byte there turns a whole run
        of byte tokens into U+FFFD; here the valid characters remain.
        """
        if self._decoder is None:
            ids = [_check_id(i) for i in ids]
            with library_errors("this tokenizer can't decode a text"):
                return self._runtime.decode(ids, skip_special_tokens=skip_special_tokens)
        table = self._text if skip_special_tokens else self._content
        text = b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._decoder.strip_first_space else text

    def token_id(self, token: str) -> int | None:
        """The id of a token, special or not, by its text in the vocabulary; None if there is none."""
        return self._runtime.token_to_id(token)

    def token_bytes(self, id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of a token; b"" for ids without one and, by default, special tokens. Keeps a dummy prefix."""
        return self._text[id] if skip_special_tokens else self._content[id]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> StreamingDetokenizer:
        """A decoder for one stream of ids. By default, special tokens have no text."""
        if self._decoder is None:
            return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens))
        token_bytes = partial(self.token_bytes, skip_special_tokens=skip_special_tokens)
        return ByteDetokenizer(token_bytes, self._decoder.strip_first_space)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, for SentencePiece, tokenizer.model.

        transformers and mlx_lm read them. Existing files are replaced.

        Raises:
            TokenizerError: Writing fails.
        """
        folder = Path(folder)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": name for role, name in self.special_token_names.items()},
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        contents = {
            "tokenizer.json": self.to_json().encode("utf-8"),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode("utf-8") + b"\n",
        }
        if self.sentencepiece_model is not None:
            contents["tokenizer.model"] = self.sentencepiece_model
        with os_errors_as(TokenizerError, "write a tokenizer to", folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_bytes(folder / name, content, TokenizerError)

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._runtime.to_str(pretty=True)

    def _encode(self, texts: list[str], add_special_tokens: bool, parse_special: bool) -> list[list[int]]:
        for text in texts:
            check_unicode(text)
        if self._words is None:
            return self._encode_by_library(texts, add_special_tokens, parse_special)
        if parse_special and self.special_tokens:
            encoded = [self._encode_between_special_tokens(text, self._words) for text in texts]
        else:
            encoded = self._words.encode_batch(texts)
        if not add_special_tokens:
            return encoded
        before, after = self._special_ids_around
        return [before + ids + after for ids in encoded]

    def _encode_between_special_tokens(self, text: str, words: WordCache) -> list[int]:
        parts = self._special_pattern.split(text)
        ids, *following = words.encode_batch(parts[::2])
        for token, more in zip(parts[1::2], following, strict=True):
            ids += [self.special_tokens[token], *more]
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _encode_by_library(
        self, texts: list[str], add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[list[int]]:
        runtime = self._parsing_runtime if parse_special else self._runtime
        with library_errors("this tokenizer can't encode a text"):
            encodings = runtime.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _content_bytes(self, id: int) -> bytes:
        token = self._runtime.id_to_token(_check_id(id))
        if token is None:
            return b""
        return token.encode("utf-8") if self._decoder is None else self._decoder.token_bytes(token)


class _Table(dict[int, bytes]):
    """The bytes of tokens by id, computed when first read."""

    def __init__(self, compute: Callable[[int], bytes]):
        self._compute = compute

    def __missing__(self, id: int) -> bytes:
        content = self[int(id)] = self._compute(id)
        return content


def check_length(ids: Sequence[int], max_length: int) -> None:
    """Raise TextTooLongError if the beginning of a text has far more than `max_length` tokens.

    Half of them are a margin: where a text is cut, the tokens next to the cut differ.
    """
    if len(ids) > 1.5 * max_length:
        raise TextTooLongError(max_length)


def _share_vocabulary(runtime: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same model and steps, and settings of its own."""
    copy = tokenizers.Tokenizer(runtime.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(copy, step, getattr(runtime, step))
    copy.add_tokens([token for _, token in sorted(runtime.get_added_tokens_decoder().items())])
    return copy


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Convert errors of the tokenizers library to TokenizerError.

    They are bare Exceptions or panics, whose type is a BaseException that can't be imported.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{message}: {error}") from error


def bos_eos_processor(runtime: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.PostProcessor:
    """A post-processor that adds BOS and EOS, each unless it is None."""
    tokens = [token for token in (bos, eos) if token]
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    second = [part.replace("$A", "$B").removesuffix(":0") + ":1" for part in single]
    return processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=[(token, runtime.token_to_id(token)) for token in tokens]
    )


def _check_id(id: int) -> int:
    if not 0 <= id < 2**32:
        raise TokenizerError(f"{id} is not a token id", "integers from 0 up")
    return int(id)


def check_unicode(text: str) -> None:
    """Raises TokenizerError if `text` has a lone surrogate, which no UTF-8 text contains."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise TokenizerError(f"the text has a lone surrogate, {where}", "text read as UTF-8") from error
