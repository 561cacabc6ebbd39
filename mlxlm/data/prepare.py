"""Text into token shards: one pass, bounded memory, all or nothing."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from mlxlm.data.duplicates import DuplicateFilter
from mlxlm.data.manifest import FILE, Manifest, Part, shares
from mlxlm.data.shards import ShardWriter, Staging
from mlxlm.data.sources import STDIN, documents
from mlxlm.data.text import Document
from mlxlm.data.tokenize import Chunk, tokenize
from mlxlm.errors import DataError
from mlxlm.files import new_folder, write_json
from mlxlm.tokenizer import Tokenizer

Encode = Callable[[Document], Iterable[Chunk]]
FEW_DOCUMENTS = 20  # with fewer, whole documents are too coarse a unit to split by


def prepare(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    text_column: str | None = None,
    dedup: float | None = None,
    validation_fraction: float = 0.05,
    validation_paths: Sequence[str | Path] = (),
    seed: int = 0,
    shard_tokens: int = 1 << 26,
    progress: Callable[[int], None] | None = None,
    stdin: IO[bytes] | None = None,
    encode: Encode | None = None,
) -> Manifest:
    """Tokenize `paths` (see `documents`; tokens as of `tokenize`) into the folder `out`, new or empty.

    `out` gets, for each split ("train", "validation"), <split>-00000.bin (little-endian uint16 where the
    vocabulary fits, else uint32; `shard_tokens` tokens each, the last one less) with <split>-00000.idx.npy
    (int64 offsets of the documents that start in it), where it has conversations <split>-00000.mask.bin (uint8, which
    tokens are to be learned), tokenizer/, and manifest.json. It appears complete or not at all: the work is done in a
    hidden folder beside it. Memory: a few megabytes of text at a time, and the document offsets of one shard.

    weights: for each of `paths` the share of training tokens to be drawn from it (their sum is taken as 1). Each then
        becomes a part of the manifest, in shards of its own. None: one part, whose text is seen in equal measure.
    text_column: see `documents`.
    dedup: leave out documents that are as similar to an earlier one as this (Jaccard similarity, above 0 and at most
        1), or the same; see `mlxlm.data.duplicates`, which also states the memory that it takes.

    Validation is `validation_paths` if given. Otherwise it is, of each part, one document out of each
    1/`validation_fraction`, drawn by `seed`; with too few documents for that (20, or 1/fraction) the last
    `validation_fraction` of all tokens, from the start of a line. The first few documents wait on disk until
    that is decided.

    progress: called with the number of bytes read since the last call.
    encode: makes the tokens of a whole document, instead of `tokenize`, as any number of documents of their own, which
        stay in one split. None of them is cut then, so that of few the last one or more are held out.

    Raises DataError for unusable sources, sources without text, an `out` in use, and a disk that cannot be
    written.
    """
    paths = list(paths)
    if not (validation_fraction == 0 or 1e-9 <= validation_fraction < 1):
        raise DataError(f"validation fraction {validation_fraction} is neither 0 nor from 1e-9 to 1", "0.05")
    groups = [("all", 1.0, paths)] if weights is None else _weighted_groups(paths, weights)
    unique = None if dedup is None else DuplicateFilter(dedup)
    read = partial(documents, stdin=stdin, advance=progress, text_column=text_column)
    fraction = None if validation_paths else validation_fraction
    with new_folder(out, DataError) as folder, ExitStack() as stack:
        builder = _Builder(tokenizer, folder, shard_tokens, stack, unique, encode)
        for name, weight, group in groups:
            builder.add_part(name, weight, read(group), fraction, seed)
        if validation_paths:
            builder.add(read(validation_paths), builder.validation)
        tokenizer.save(folder / "tokenizer")
        return builder.finish([_source_name(path) for path in (*paths, *validation_paths)])


def _weighted_groups(paths: list[str | Path], weights: Sequence[float]) -> list[tuple[str, float, list[str | Path]]]:
    """Name, weight and paths of every part."""
    if len(weights) != len(paths):
        raise DataError(f"{len(paths)} sources have {len(weights)} weights", "one weight for each source")
    try:
        weights = shares(list(weights))
    except ValueError as error:
        raise DataError(str(error), "weights such as 0.7 and 0.3") from None
    names: list[str] = []
    for path in paths:
        name = _source_name(path)
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        names.append(name if name not in names else next(other for other in numbered if other not in names))
    return [(name, weight, [path]) for name, weight, path in zip(names, weights, paths, strict=True)]


def _source_name(path: str | Path) -> str:
    """Names, not absolute paths: a dataset may be published."""
    return "stdin" if str(path) == STDIN else Path(path).name or str(path)


class _Builder:
    """Tokenizes documents into the shards of the two splits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        shard_tokens: int,
        stack: ExitStack,
        unique: DuplicateFilter | None,
        encode: Encode | None,
    ):
        self._tokenizer = tokenizer
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._stack = stack
        self._unique = unique
        self._encode = encode
        self._dtype_name = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._dtype = np.dtype(self._dtype_name).newbyteorder("<")
        self._chat_documents = 0
        self._parts: list[Part] = []
        self._splits: set[str] = set()
        self.validation = self._writer("validation", 0)

    def add_part(self, name: str, weight: float, source: Iterable[Document], fraction: float | None, seed: int) -> None:
        """Write `source` as a part: `fraction` of it for validation; None: all of it for training."""
        train = self._writer("train", sum(len(part.train.shards) for part in self._parts))
        if fraction is None:
            self.add(source, train)
            self._splits.add("given")
        else:
            self._splits.add(self._add_and_split(source, train, fraction, seed))
        self._parts.append(Part(name, weight, train.finish()))
        if not self._parts[-1].train.tokens:
            raise DataError(f"nothing of {name} is left to train on", "a source with more text")

    def _writer(self, split: str, first: int) -> ShardWriter:
        writer = ShardWriter(self._folder, split, self._dtype, self._shard_tokens, first)
        return self._stack.enter_context(closing(writer))

    def add(self, source: Iterable[Document], writer: ShardWriter) -> None:
        for _, chunk in self._chunks(source):
            writer.add(*chunk)

    def _chunks(self, source: Iterable[Document]) -> Iterator[tuple[bool, Chunk]]:
        """Each chunk, and whether it is the first of a document of the source."""
        counted = self._counted(source)
        if self._encode is None:
            yield from ((chunk.starts_document, chunk) for chunk in tokenize(counted, self._tokenizer))
        else:
            yield from ((i == 0, chunk) for document in counted for i, chunk in enumerate(self._encode(document)))

    def _add_and_split(self, source: Iterable[Document], train: ShardWriter, fraction: float, seed: int) -> str:
        """Write `source` to both splits; returns how, "document" or "tail"."""
        few = max(FEW_DOCUMENTS, math.ceil(1 / fraction)) if fraction else 0
        writers = (self.validation if drawn else train for drawn in _drawn(fraction, seed))
        count = 0
        pieces: list[int] = []  # of each document of the source that is staged
        with closing(Staging(self._folder / "staging", self._dtype)) as staging:
            target: ShardWriter | Staging = staging
            for first, chunk in self._chunks(source):
                count += first
                if first and count >= few:
                    if target is staging:
                        _move_all(staging, pieces, writers)
                        staging.close()
                    target = next(writers)
                if target is staging and first:
                    pieces.append(0)
                if target is staging:
                    pieces[-1] += chunk.starts_document
                target.add(*chunk)
            if target is not staging:
                return "document"
            if self._encode is not None:
                held = min(count - 1, math.ceil(fraction * count))
                _move_all(staging, pieces, (self.validation if i >= count - held else train for i in range(count)))
                return "document"
            self._split_tail(staging, train, fraction)
            return "tail"

    def finish(self, sources: list[str]) -> Manifest:
        """Complete the shards of validation, then the manifest."""
        result = Manifest(
            fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype_name,
            split=self._splits.pop() if len(self._splits) == 1 else "mixed",
            chat_documents=self._chat_documents,
            sources=sources,
            parts=self._parts,
            validation=self.validation.finish(),
            duplicates=self._unique and self._unique.found,
        )
        write_json(self._folder / FILE, result.to_dict())
        return result

    def _counted(self, source: Iterable[Document]) -> Iterator[Document]:
        document = None
        read_before = self._unique.found.documents if self._unique else 0
        for document in source if self._unique is None else self._unique(source):
            self._chat_documents += document.messages is not None
            yield document
        if document is None and self._unique and self._unique.found.documents > read_before:
            raise DataError("all documents of a source repeat earlier ones", "preparing without it, or without dedup")
        if document is None:
            raise DataError("there is no text in the sources", "files with some text")

    def _split_tail(self, staging: Staging, train: ShardWriter, fraction: float) -> None:
        cut = staging.tokens - max(1, round(fraction * staging.tokens))
        for start, stop, text_bytes in staging.documents():
            at = stop if stop <= cut else start if start >= cut else self._line_start(staging, start, cut)
            tail_bytes = text_bytes if at == start else min(text_bytes, self._text_bytes(staging, at, stop))
            _move(staging, train, start, at, text_bytes - tail_bytes)
            _move(staging, self.validation, at, stop, tail_bytes)

    def _line_start(self, staging: Staging, start: int, near: int, reach: int = 4096) -> int:
        """The last start of a line in the `reach` tokens of a document before `near`; `near` if there is none."""
        for ids, _ in staging.blocks(max(start, near - reach), near):
            for at in range(len(ids), 0, -1):
                if self._tokenizer.token_bytes(int(ids[at - 1])).endswith(b"\n"):
                    return near - len(ids) + at
        return near

    def _text_bytes(self, staging: Staging, start: int, stop: int) -> int:
        """The bytes of text that staged ids stand for; nearly so where tokens depend on their neighbours."""
        blocks = (ids for ids, _ in staging.blocks(start, stop))
        if not self._tokenizer.has_byte_tokens:
            return sum(len(self._tokenizer.decode(ids.tolist()).encode("utf-8")) for ids in blocks)
        counts = np.zeros(self._tokenizer.vocab_size, np.int64)
        for ids in blocks:
            counts += np.bincount(ids, minlength=len(counts))
        used = np.flatnonzero(counts).tolist()
        return sum(len(self._tokenizer.token_bytes(i)) * int(counts[i]) for i in used)


def _move(staging: Staging, writer: ShardWriter, start: int, stop: int, text_bytes: int) -> None:
    """Write the staged tokens [start, stop) as a document of so many bytes; none as nothing."""
    for i, (ids, learned) in enumerate(staging.blocks(start, stop)):
        writer.add(ids, 0 if i else text_bytes, i == 0, learned)


def _move_all(staging: Staging, pieces: Sequence[int], writers: Iterator[ShardWriter]) -> None:
    """Write what is staged, so many documents together to each of the writers."""
    documents = staging.documents()
    for count in pieces:
        writer = next(writers)
        for document in itertools.islice(documents, count):
            _move(staging, writer, *document)


def _drawn(fraction: float, seed: int) -> Iterator[bool]:
    """For document 0, 1, ...: whether it is drawn for validation. One document, at a random place, out of each
    1/`fraction` (stratified sampling), so that no split is empty by bad luck."""
    if not fraction:
        yield from itertools.repeat(False)
    stratum = 0
    drawn = int(_uniform(seed, 0) / fraction)
    for index in itertools.count():
        yield index == drawn
        while drawn <= index:
            stratum += 1
            drawn = int((stratum + _uniform(seed, stratum)) / fraction)


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
