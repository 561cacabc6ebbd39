"""Tokenizes text into shards: in bounded memory, all or nothing."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxlm.data.dedup import DuplicateFilter
from mlxlm.data.manifest import MANIFEST_FILE, FormatCount, Manifest, TrainPart
from mlxlm.data.options import DataOptions, source_name
from mlxlm.data.shards import ShardWriter
from mlxlm.data.sources import read_documents, spool_streams
from mlxlm.data.text import Advance, BadInput, Document, OnBad
from mlxlm.data.tokenize import Chunk, check_conversation, tokenize
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import write_json

Encode = Callable[[Document], Iterable[Chunk]]
MIN_DOCUMENTS = 20  # with fewer, whole documents are too coarse a unit to split by
_BLOCK_BYTES, _MAX_BLOCKS = 4096, 32  # of a text that is cut: a block is several sequences long


def prepare(
    data: DataOptions,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    seed: int = 0,
    shard_tokens: int = 1 << 26,
    encode: Encode | None = None,
    progress: Advance | None = None,
) -> Manifest:
    """Tokenize text into the folder `out`, which must be new or empty.

    `out` gets, for each split ("train", "validation"):

    - <split>-00000.bin, ...: tokens, little-endian uint16 where the vocabulary fits, else uint32; `shard_tokens` in
      each file but the last.
    - <split>-00000.idx.npy: int64 offsets of the documents that start in the shard.
    - <split>-00000.mask.bin: for conversations, the loss mask, uint8.

    and tokenizer/ and manifest.json. It appears complete or not at all: the work is done in a hidden folder next to it.
    Memory: a few megabytes of text at a time, the document offsets of one shard, and the index of `data.dedup`.

    Validation is `data.validation`, or what `ValidationSplit` holds out of each source. To decide that, the first few
    documents are read twice; stdin and named pipes are copied to disk first.

    Args:
        data: Sources and how to read them. With weights, each source is a part of the manifest with its own shards.
        tokenizer: Encodes the text, see `tokenize`, and is saved with the tokens.
        out: Folder to make.
        seed: Draws the documents for validation.
        shard_tokens: Tokens per file.
        encode: Encodes a whole document, instead of `tokenize`, into any number of documents that stay in one split. A
            DataError that it raises counts as bad input.
        progress: Called with the number of bytes read since the last call.

    Returns:
        The manifest.

    Raises:
        DataError: A source is unusable or has no text, `out` is in use, or the disk can't be written.
    """
    fraction = None if data.validation else data.validation_fraction
    with atomic_new_folder(out, DataError) as folder, ExitStack() as stack:
        builder = _Builder(data, tokenizer, folder, stack, shard_tokens, encode, progress)
        for name, weight, paths in _parts(data):
            builder.add_part(name, weight, paths, fraction, seed)
        if data.validation:
            builder.add(data.validation, builder.validation)
        tokenizer.save(folder / "tokenizer")
        return builder.finish()


def training_texts(
    data: DataOptions, *, seed: int = 0, progress: Advance | None = None, held_out: bool = False
) -> Iterator[str]:
    """The text that `prepare` trains on with the same arguments, in pieces: for training a tokenizer.

    With `held_out`, it is the text that `prepare` holds out of the sources.

    `ValidationSplit` reads the first documents of each source twice, so sources can't be stdin or pipes.
    """
    fraction = 0 if data.validation else data.validation_fraction
    for _, _, paths in _parts(data):
        split = ValidationSplit(read_sources(data, paths, BadInput(data.on_bad_input)), fraction, seed)
        for is_held_out, document in split(read_sources(data, paths, BadInput(data.on_bad_input), progress)):
            for piece in itertools.chain(document.pieces, document.contents):
                if is_held_out == held_out:
                    yield piece


def read_sources(
    data: DataOptions,
    paths: Sequence[str | Path],
    on_bad: OnBad,
    progress: Advance | None = None,
    check: Callable[[Document], None] = check_conversation,
) -> Generator[Document, None, None]:
    """Yield the documents of `paths`, read as `data` says. Those for which `check` raises a DataError are bad input."""
    for document in read_documents(
        paths, stdin=data.stdin, advance=progress, text_column=data.text_column, on_bad=on_bad, fraction=data.fraction
    ):
        try:
            check(document)
        except DataError as error:
            on_bad(error)
        else:
            yield document


def _parts(data: DataOptions) -> list[tuple[str, float, Sequence[str | Path]]]:
    """Name, weight and paths of each part of the training text."""
    if data.weights is None:
        return [("all", 1.0, data.sources)]
    named = zip(data.source_names(), data.weights, data.sources, strict=True)
    return [(name, weight, [path]) for name, weight, path in named]


@dataclass
class _Builder:
    """Writes documents into the shards of the two splits. Its files are closed with `stack`."""

    data: DataOptions
    tokenizer: Tokenizer
    folder: Path
    stack: ExitStack
    shard_tokens: int
    encode: Encode | None
    progress: Advance | None

    def __post_init__(self) -> None:
        self._bad_input = BadInput(self.data.on_bad_input)
        self._duplicate_filter = None if self.data.dedup is None else DuplicateFilter(self.data.dedup)
        self._dtype = "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._num_conversations = 0
        self._formats: Counter[str] = Counter()
        self._parts: list[TrainPart] = []
        self._split_kinds: set[str] = set()
        self.validation = self._writer("validation", 0)

    def add_part(
        self, name: str, weight: float, paths: Sequence[str | Path], fraction: float | None, seed: int
    ) -> None:
        """Write `paths` as a part, `fraction` of it for validation; None: validation comes from other files."""
        train = self._writer("train", sum(len(part.train.shards) for part in self._parts))
        if fraction is None:
            self.add(paths, train)
            self._split_kinds.add("files")
        elif self.encode is not None:
            self._encode_and_split(self._encoded_documents(paths, self.encode), train, fraction, seed)
            self._split_kinds.add("documents")
        else:
            if fraction:  # the first documents are read twice
                paths = spool_streams(paths, self.data.stdin, self.folder, self.stack)
            split = ValidationSplit(self._preview(paths), fraction, seed)
            self._tokenize_and_split(split, paths, train)
            self._split_kinds.add(split.kind)
        self._parts.append(TrainPart(name, weight, train.finish()))
        if not self._parts[-1].train.tokens:
            raise DataError(f"nothing of {name} is left to train on", "a source with more text")

    def add(self, paths: Sequence[str | Path], writer: ShardWriter) -> None:
        """Write all documents of `paths` into one split."""
        if self.encode is None:
            chunks = tokenize(self._documents(paths), self.tokenizer)
        else:
            chunks = itertools.chain.from_iterable(self._encoded_documents(paths, self.encode))
        for chunk in chunks:
            writer.add(*chunk)

    def finish(self) -> Manifest:
        """Complete the validation split and write the manifest."""
        manifest = Manifest(
            fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            dtype=self._dtype,
            validation_split=self._split_kinds.pop() if len(self._split_kinds) == 1 else "mixed",
            num_conversations=self._num_conversations,
            sources=[source_name(path) for path in (*self.data.sources, *self.data.validation)],
            parts=self._parts,
            validation=self.validation.finish(),
            dedup=self._duplicate_filter.stats if self._duplicate_filter else None,
            skipped=self._bad_input.skipped,
            skip_reasons=list(self._bad_input.reasons.values()),
            formats=[FormatCount(name, count) for name, count in self._formats.most_common() if count],
        )
        write_json(self.folder / MANIFEST_FILE, manifest.to_dict())
        return manifest

    def _writer(self, split: str, first: int) -> ShardWriter:
        dtype = np.dtype(self._dtype).newbyteorder("<")
        return self.stack.enter_context(closing(ShardWriter(self.folder, split, dtype, self.shard_tokens, first)))

    def _tokenize_and_split(self, split: ValidationSplit, paths: Sequence[str | Path], train: ShardWriter) -> None:
        held_out: deque[bool] = deque()  # for the documents in `tokenize`

        def documents() -> Iterator[Document]:
            for is_held_out, document in split(self._documents(paths)):
                held_out.append(is_held_out)
                yield document

        writer = train
        for chunk in tokenize(documents(), self.tokenizer):
            if chunk.starts_document:
                writer = self.validation if held_out.popleft() else train
            writer.add(*chunk)

    def _encode_and_split(
        self, documents: Iterable[list[Chunk]], train: ShardWriter, fraction: float, seed: int
    ) -> None:
        writers = (self.validation if held_out else train for held_out in validation_draws(fraction, seed))
        enough = min_documents_to_split(fraction)
        pending: list[list[Chunk]] = []
        for chunks in documents:
            pending.append(chunks)
            if len(pending) >= enough:
                enough = 0
                _write(pending, writers)
                pending = []
        if pending:  # too few to draw from: hold out the last
            held_out = min(len(pending) - 1, math.ceil(fraction * len(pending)))
            _write(pending[: len(pending) - held_out], itertools.repeat(train))
            _write(pending[len(pending) - held_out :], itertools.repeat(self.validation))

    def _encoded_documents(self, paths: Sequence[str | Path], encode: Encode) -> Iterator[list[Chunk]]:
        for document in self._documents(paths):
            try:
                chunks = list(encode(document))
            except DataError as error:
                self._num_conversations -= document.messages is not None
                self._formats[document.format] -= 1
                self._bad_input(error)
            else:
                yield chunks

    def _documents(self, paths: Sequence[str | Path]) -> Iterator[Document]:
        """Read documents, without duplicates, and count them. Raises DataError if there are none."""
        document, dedup = None, self._duplicate_filter
        previously_read = dedup.stats.documents if dedup else 0
        check = check_conversation if self.encode is None else lambda _document: None  # `encode` checks them itself
        documents = read_sources(self.data, paths, self._bad_input, self.progress, check)
        for document in dedup(documents) if dedup else documents:
            self._num_conversations += document.messages is not None
            self._formats[document.format] += 1
            yield document
        if document is None and dedup and dedup.stats.documents > previously_read:
            raise DataError("all documents of a source repeat earlier ones", "preparing without it, or without dedup")
        if document is None:
            count = self._bad_input.skipped
            skipped = f": all {count} lines were skipped as bad input" if count else ""
            raise DataError(f"there is no text in the sources{skipped}", "files with some text")

    def _preview(self, paths: Sequence[str | Path]) -> Generator[Document, None, None]:
        """What `_documents` will yield, without counting."""
        documents = read_sources(self.data, paths, copy.deepcopy(self._bad_input))
        return documents if self._duplicate_filter is None else copy.deepcopy(self._duplicate_filter)(documents)


def _write(documents: Iterable[Iterable[Chunk]], writers: Iterator[ShardWriter]) -> None:
    for document, writer in zip(documents, writers, strict=False):
        for chunk in document:
            writer.add(*chunk)


# Validation is held out before the text is tokenized, so that a tokenizer can be trained on the rest.


class ValidationSplit:
    """Splits documents into training and validation, deterministically.

    Holds out one document of every 1/`fraction`, drawn by `seed`. With fewer than 20 documents (or 1/`fraction`), it
    holds out blocks of the text instead, from line start to line start, spread over all of it: the end of a text is
    often about something else than the rest. Conversations are never cut: of few of them, the last are held out.

    Args:
        preview: All documents, to see whether there are few; those are read to their end. It is closed.
        fraction: Share to hold out.
        seed: Draws the documents or the blocks.

    Attributes:
        kind: "documents", or "blocks" if a document can be cut.
    """

    def __init__(self, preview: Generator[Document, None, None], fraction: float, seed: int):
        self._fraction, self._seed = fraction, seed
        enough = min_documents_to_split(fraction)
        with closing(preview) as documents:
            first = [(_num_bytes(d), d.messages is None) for d in itertools.islice(documents, enough)]
        self._sizes = [size for size, _ in first]
        self.kind = "documents" if len(first) == enough else "blocks"
        total = sum(self._sizes)
        held_out = max(1, round(fraction * total))
        spread = all(is_text for _, is_text in first)
        self._blocks = _draw_blocks(total, held_out, seed) if spread else [(total - held_out, total)]

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[bool, Document]]:
        """Yield the same documents again, each with whether it is held out; one that is cut comes in parts."""
        if self.kind == "documents":
            yield from zip(validation_draws(self._fraction, self._seed), documents, strict=False)
            return
        start = 0
        for size, document in zip(self._sizes, documents, strict=True):
            end = start + size
            if document.messages is not None:
                yield start > 0 and end > self._blocks[-1][0], document
            else:
                is_held_out = any(low <= start < high for low, high in self._blocks)
                cuts = [bound - start for block in self._blocks for bound in block if start < bound < end]
                for number, pieces in enumerate(_cut(document.pieces, cuts)):
                    add_bos, add_eos = document.add_bos and number == 0, document.add_eos and number == len(cuts)
                    yield is_held_out, replace(document, pieces=pieces, add_bos=add_bos, add_eos=add_eos)
                    is_held_out = not is_held_out
            start = end


def _draw_blocks(total: int, held_out: int, seed: int) -> list[tuple[int, int]]:
    """Return the bounds of blocks of `held_out` of `total` bytes: one at a random place in each of equal parts."""
    count = min(_MAX_BLOCKS, max(1, held_out // _BLOCK_BYTES))
    free = total - held_out  # shared equally by the parts, before and behind their blocks
    starts = [int((i + _uniform(seed, i)) * free / count) + i * held_out // count for i in range(count)]
    return [(start, start + held_out // count) for start in starts]


def min_documents_to_split(fraction: float) -> int:
    """Number of documents from which on whole documents are held out."""
    return max(MIN_DOCUMENTS, math.ceil(1 / fraction)) if fraction else 0


def validation_draws(fraction: float, seed: int) -> Iterator[bool]:
    """For document 0, 1, ...: whether it is held out.

    One document, at a random place, of every 1/`fraction` (stratified sampling), so that no split is empty by chance.
    """
    if not fraction:
        yield from itertools.repeat(False)
    stratum = 0
    chosen = int(_uniform(seed, 0) / fraction)
    for index in itertools.count():
        yield index == chosen
        while chosen <= index:
            stratum += 1
            chosen = int((stratum + _uniform(seed, stratum)) / fraction)


def _uniform(seed: int, index: int) -> float:
    """A pseudorandom number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _num_bytes(document: Document) -> int:
    return sum(len(text.encode("utf-8")) for text in itertools.chain(document.pieces, document.contents))


def _cut(pieces: Iterator[str], cuts: Sequence[int]) -> Iterator[Iterator[str]]:
    """Cut a text near the byte offsets `cuts`, in ascending order. Read each part to its end before the next.

    A cut is at the last line start before it, or at the character if the part would have no line.
    """
    position, rest = 0, ""

    def part(stop: float) -> Iterator[str]:
        nonlocal position, rest
        line_ended = False  # of a part that isn't empty
        while piece := rest or next(pieces, ""):
            encoded, rest = piece.encode("utf-8"), ""
            if position + len(encoded) > stop:
                at = len(encoded[: int(stop) - position].decode("utf-8", "ignore"))
                line = piece.rfind("\n", 0, at) + 1
                if not line and not line_ended:
                    line = at
                piece, rest = piece[:line], piece[line:]
            position += len(piece.encode("utf-8"))
            line_ended = piece.endswith("\n")
            if piece:
                yield piece
            if rest:
                return

    for stop in (*cuts, math.inf):
        yield part(stop)
