"""The tokenizer: text to ids, ids to text, for every kind of tokenizer through one interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from mlxlm.tokenizer.byte_decoder import ByteDecoder
from mlxlm.tokenizer.detokenizer import ByteDetokenizer, StreamingDetokenizer, WindowDetokenizer
from mlxlm.utils.errors import TokenizerError, os_errors_as
from mlxlm.utils.files import write_bytes

LARGEST_VOCABULARY = 1 << 24  # the largest in use have about 260,000 tokens
_LONGEST_TOKEN = 1 << 16  # characters; a text of a thousand of them still fits into memory
_LEAD = "\n"
ROLES = ("bos", "eos", "pad", "unk")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: highest id + 1, special tokens included.
        bos_id, eos_id, pad_id, unk_id: ids of the special tokens, or None.
        special_tokens: text of every special token, with its id.
        chat_template: jinja source, or None; settable.
    """

    def __init__(
        self,
        runtime: tokenizers.Tokenizer,
        names: dict[str, str | None],
        *,
        chat_template: str | None = None,
        sentencepiece_model: bytes | None = None,
    ):
        """`names`: texts of the special tokens, keys from ROLES. `sentencepiece_model`: kept for `save`."""
        # A tokenizer.json may carry the length limit or the padding of its model: neither is wanted here.
        runtime.no_truncation()
        runtime.no_padding()
        self._runtime = runtime
        self._lock = threading.Lock()  # guards runtime.encode_special_tokens, a setting and not an argument
        vocabulary = runtime.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > LARGEST_VOCABULARY:  # tables of this length will be allocated
            raise TokenizerError(f"a token has the id {self.vocab_size - 1}", f"ids below {LARGEST_VOCABULARY}")
        if max(map(len, vocabulary), default=0) > _LONGEST_TOKEN:
            raise TokenizerError(f"a token has more than {_LONGEST_TOKEN} characters", "tokens of text")
        self.special_token_names = {role: name for role in ROLES if (name := names.get(role)) in vocabulary}
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (vocabulary.get(names.get(r)) for r in ROLES)
        added = runtime.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {t.content: i for i, t in sorted(added.items()) if t.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self.chat_template = chat_template
        self.sentencepiece_model = sentencepiece_model
        self._decoder = ByteDecoder.of(runtime)
        self._bytes: dict[int, bytes] = {}

    @property
    def min_vocab_size(self) -> int:
        """The least that a model's vocabulary must have: highest id + 1 of a text, of what `encode` puts around it, and
        of the chat template. A model for pictures may have special tokens beyond, which no text becomes."""
        around, template = self.encode(""), self.chat_template or ""
        unused = {id for text, id in self.special_tokens.items() if id not in around and text not in template}
        ids = self._runtime.get_vocab(with_added_tokens=True).values()
        return max((id for id in ids if id not in unused), default=-1) + 1

    def __repr__(self) -> str:
        return f"Tokenizer({self.tokenizer_type}, vocab_size={self.vocab_size})"

    @property
    def tokenizer_type(self) -> str:
        """Either "byte-level", "sentencepiece" (BPE with byte fallback), or another model's name in lower case."""
        if self._decoder is None:
            return type(self._runtime.model).__name__.lower()
        return "byte-level" if self._decoder.byte_level else "sentencepiece"

    @cached_property
    def adds_dummy_prefix(self) -> bool:
        """Whether `encode` puts a space in front of a text (a dummy prefix)."""
        line_end, both = self._encode([_LEAD, _LEAD + "a"], add_special_tokens=False, parse_special=False)
        return both[len(line_end) :] != self._encode(["a"], add_special_tokens=False, parse_special=False)[0]

    @property
    def strips_dummy_prefix(self) -> bool:
        """Whether `decode` and `stream` leave out a space at the beginning of a text (Llama 2's dummy prefix)."""
        return self._decoder is not None and self._decoder.strip_first_space

    @property
    def has_byte_tokens(self) -> bool:
        """Whether `token_bytes` are the bytes of text, whatever a token's neighbours; else they are its spelling."""
        return self._decoder is not None

    @property
    def prefix_token_ids(self) -> list[int]:
        """What `encode` puts in front of a text by itself, usually BOS or nothing."""
        whole, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        return whole[: next((n for n in range(len(whole) - len(bare) + 1) if whole[n : n + len(bare)] == bare), 0)]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the canonical tokenizer.json. The chat template is not part of it."""
        content = json.loads(self._runtime.to_str())
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, continues: bool = False
    ) -> list[int]:
        """The ids of `text`.

        add_special_tokens: also what the tokenizer puts around a text (usually BOS in front), as
            transformers does.
        parse_special: False: text that looks like a special token ("<|user|>") is ordinary text, so that
            neither data nor a person can forge a control token. True: it becomes that token (rendered chat
            templates).
        continues: `text` goes on where another one stopped: nothing is put around it, and no space in front.

        Raises TokenizerError if `text` has lone surrogates, which no UTF-8 text contains.
        """
        [ids] = self._encode_parts([text], [continues], add_special_tokens and not continues, parse_special)
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, continues: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """`encode` of every text, in parallel (Rust threads), special tokens in the texts never parsed."""
        return self._encode_parts(texts, continues or [False] * len(texts), add_special_tokens, parse_special=False)

    def _encode_parts(
        self, texts: Sequence[str], continues: Sequence[bool], add_special_tokens: bool, parse_special: bool
    ) -> list[list[int]]:
        if not (any(continues) and self.adds_dummy_prefix):
            return self._encode(list(texts), add_special_tokens, parse_special)
        # A line end takes the space that would come first, and its ids are dropped. Tokenizers that add a
        # space never merge a line end with what follows it.
        dropped = len(self._encode([_LEAD], False, False)[0])
        led = [_LEAD + text if goes_on else text for text, goes_on in zip(texts, continues, strict=True)]
        encoded = self._encode(led, add_special_tokens, parse_special)
        return [ids[dropped:] if goes_on else ids for ids, goes_on in zip(encoded, continues, strict=True)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token (a model's padding rows) add nothing.

        Equal to transformers' decode, with one exception: a byte-fallback tokenizer there turns a whole run
        of byte tokens into U+FFFD if one byte of it is invalid; here valid characters around it survive.
        """
        if self._decoder is None:
            ids = [_checked(i) for i in ids]
            with library_errors("this tokenizer can't decode a text"):
                return self._runtime.decode(ids, skip_special_tokens=skip_special_tokens)
        bytes_of = self.token_bytes if skip_special_tokens else self._content_bytes
        text = b"".join(map(bytes_of, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._decoder.strip_first_space else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: b"" for special tokens and for ids without a token.

        A first-space rule of the whole text (Llama 2's dummy prefix) is not applied to single tokens.
        """
        return b"" if id in self._special_ids else self._content_bytes(id)

    def detokenizer(self) -> StreamingDetokenizer:
        """A decoder for one stream of ids; special tokens add no text."""
        if self._decoder is None:
            return WindowDetokenizer(self.decode)
        return ByteDetokenizer(self.token_bytes, self._decoder.strip_first_space)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there is one, tokenizer.model, which transformers and
        mlx_lm read. Existing files are replaced one by one.

        Raises TokenizerError if the folder cannot be written.
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
        with self._lock:
            self._runtime.encode_special_tokens = not parse_special
            with library_errors("this tokenizer can't encode a text"):
                encodings = self._runtime.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _content_bytes(self, id: int) -> bytes:
        content = self._bytes.get(id)
        if content is None:
            token = self._runtime.id_to_token(_checked(id))
            if token is None:
                content = b""
            elif self._decoder is None:
                content = token.encode("utf-8")
            else:
                content = self._decoder.bytes_of(token)
            self._bytes[int(id)] = content
        return content


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """The library's errors as TokenizerError: a bare Exception for a tokenizer that doesn't add up, or a panic, which
    Python sees as a BaseException of a type that can't be imported."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{message}: {error}") from error


def bos_eos_processor(runtime: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.PostProcessor:
    """What `encode` puts around a text: `bos` in front and `eos` at the end, each where not None."""
    tokens = [token for token in (bos, eos) if token]
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    second = [part.replace("$A", "$B").removesuffix(":0") + ":1" for part in single]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(token, runtime.token_to_id(token)) for token in tokens],
    )


def _checked(id: int) -> int:
    if not 0 <= id < 2**32:
        raise TokenizerError(f"{id} is not a token id", "ids from 0 up")
    return int(id)


def check_unicode(text: str) -> None:
    """Raises TokenizerError if `text` has a lone surrogate, which no UTF-8 text contains."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise TokenizerError(f"the text has a lone surrogate, {where}", "text read as UTF-8") from error
