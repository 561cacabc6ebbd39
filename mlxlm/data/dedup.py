"""Deduplication: leaves out documents that repeat an earlier one, exactly or nearly.

A text is the set of its shingles, runs of five words; a word is a run of letters and digits, in lower case, or one
character of Chinese, Japanese or Korean. The Jaccard similarity of two texts (shingles in both, divided by shingles in
either) is estimated by the share of 128 hash functions with the same minimum over the shingles (MinHash: Broder, "On
the resemblance and containment of documents", 1997): unbiased, with a standard deviation of at most 0.044. Candidates
are texts that have all minima of a band in common (locality-sensitive hashing: Leskovec, Rajaraman and Ullman, "Mining
of Massive Datasets", section 3.4).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Generator, Iterable
from dataclasses import replace

import numpy as np

from mlxlm.data.manifest import DedupStats
from mlxlm.data.packing import splitmix64
from mlxlm.data.text import Document

NUM_HASHES = 128
_SHINGLE_WORDS = 5  # GPT-3's and The Pile's filters take 5 to 13; shorter shingles survive more edits
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"  # each character counts as a word
_WORD = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")
_LAST_WORD = re.compile(r"\s\S*\Z")
_MAX_WORD = 1 << 16  # characters; longer runs without a space are cut, to bound memory
_BLOCK = 512  # shingles hashed at a time: [512, 128] uint64 stays in a core's cache
_MAX_MISSED = 0.02  # share of the pairs with exactly the threshold's similarity that no band finds, at most
_MAX_BUCKET = 64  # candidates of one bucket, the latest: each new text would be compared with thousands otherwise

_random = np.random.default_rng(0x5EED)
_MULTIPLIERS, _ADDENDS = _random.integers(0, 1 << 64, (2, NUM_HASHES), np.uint64) | np.uint64(1)
_POSITIONS = _random.integers(0, 1 << 64, _SHINGLE_WORDS, np.uint64) | np.uint64(1)


class MinHash:
    """The MinHash signature of one text, added in any number of pieces."""

    def __init__(self) -> None:
        self._pending = ""  # a word that the next piece can continue
        self._words = np.empty(0, np.uint64)  # hashes of the last words, which are part of the next shingles
        self._minima = np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
        self._has_shingle = False

    def add(self, piece: str) -> None:
        """Add the next piece of the text."""
        text = self._pending + piece
        last_word = _LAST_WORD.search(text, max(0, len(text) - _MAX_WORD))
        end = last_word.start() if last_word else len(text) if len(text) > _MAX_WORD else 0
        self._pending = text[end:]
        self._add_words(text[:end])

    def signature(self, digest: bytes) -> np.ndarray:
        """The minima, uint64 `[128]`.

        A text of fewer than five words is a single shingle; one without words is identified by its 8-byte `digest`.
        """
        self._add_words(self._pending)
        if not self._has_shingle:
            whole = self._words if len(self._words) else np.frombuffer(digest, np.uint64)
            self._add_shingles(splitmix64((whole * _POSITIONS[: len(whole)]).sum(keepdims=True)))
        return self._minima

    def _add_words(self, text: str) -> None:
        hashes = [zlib.crc32(word.encode("utf-8")) for word in _WORD.findall(text.lower())]
        words = np.concatenate([self._words, np.array(hashes, np.uint64)])
        count = len(words) - _SHINGLE_WORDS + 1
        if count > 0:
            sums = sum(words[i : i + count] * _POSITIONS[i] for i in range(_SHINGLE_WORDS))
            self._add_shingles(splitmix64(sums))
            self._has_shingle = True
        self._words = words[max(0, count) :]

    def _add_shingles(self, shingles: np.ndarray) -> None:
        for start in range(0, len(shingles), _BLOCK):
            hashes = shingles[start : start + _BLOCK, None] * _MULTIPLIERS + _ADDENDS
            np.minimum(self._minima, hashes.min(axis=0), out=self._minima)


class MinHashLSH:
    """An index of texts, no two of which are as similar as `threshold`.

    A threshold of 1 compares digests only. Memory per text: about 100 bytes for its digest, 256 for its signature (16
    bits of each minimum), and 8·b for buckets and links with b bands (b = 18 at 0.8), in tables that double when full.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        # As many rows per band as still find nearly all pairs of the threshold's similarity: fewest false candidates.
        self._rows = max((r for r in range(1, 33) if (1 - threshold**r) ** (NUM_HASHES // r) <= _MAX_MISSED), default=1)
        self._bands = NUM_HASHES // self._rows
        self._count = 0
        self._signatures = np.empty((0, NUM_HASHES), np.uint16)
        self._digests: set[bytes] = set()
        self._allocate(1024)

    def add(self, minima: np.ndarray, digest: bytes) -> str | None:
        """Add a text unless it is a duplicate.

        Returns:
            "exact" if another text has the same digest, "near" if another text is similar, None if the text was added.
        """
        if digest in self._digests:
            return "exact"
        if self._threshold < 1 and not self._add_signature(minima):
            return "near"
        self._digests.add(digest)
        return None

    def _add_signature(self, minima: np.ndarray) -> bool:
        """Add a signature unless there is a similar one; returns whether it was added."""
        # The upper bits of a minimum are small for all long texts; the lowest bits of a product depend on few others.
        signature = (minima >> np.uint64(24)).astype(np.uint16)
        buckets = self._buckets(signature[None])[0]
        candidates = self._candidates(buckets)
        if len(candidates) and (self._signatures[candidates] == signature).mean(axis=1).max() >= self._threshold:
            return False
        if self._count == len(self._signatures):
            self._allocate(2 * self._count)
            buckets = self._buckets(signature[None])[0]
        self._signatures[self._count] = signature
        self._link(self._count, buckets)
        self._count += 1
        return True

    def _allocate(self, capacity: int) -> None:
        signatures = np.empty((capacity, NUM_HASHES), np.uint16)
        signatures[: self._count] = self._signatures
        self._signatures = signatures
        self._next = np.zeros((capacity, self._bands), np.uint32)  # the previous text in the same bucket, + 1
        self._heads = np.zeros((self._bands, capacity), np.uint32)  # the last text in each bucket, + 1
        for start in range(0, self._count, 4096):
            for i, buckets in enumerate(self._buckets(signatures[start : min(start + 4096, self._count)]), start):
                self._link(i, buckets)

    def _buckets(self, signatures: np.ndarray) -> np.ndarray:
        """The bucket of each band: signatures `[N, 128]` to int64 `[N, bands]`."""
        bands = signatures[:, : self._bands * self._rows].reshape(-1, self._bands, self._rows).astype(np.uint64)
        keys = (bands * _MULTIPLIERS[: self._rows]).sum(axis=2) + _ADDENDS[: self._bands]
        return (splitmix64(keys) & np.uint64(self._heads.shape[1] - 1)).astype(np.int64)

    def _link(self, text: int, buckets: np.ndarray) -> None:
        bands = np.arange(self._bands)
        self._next[text] = self._heads[bands, buckets]
        self._heads[bands, buckets] = text + 1

    def _candidates(self, buckets: np.ndarray) -> np.ndarray:
        candidates = []
        bands = np.arange(self._bands)
        texts = self._heads[bands, buckets]
        for _ in range(_MAX_BUCKET):
            bands, texts = bands[texts > 0], texts[texts > 0].astype(np.int64) - 1
            if not len(texts):
                break
            candidates.append(texts)
            texts = self._next[texts, bands]
        return np.unique(np.concatenate(candidates)) if candidates else np.empty(0, np.int64)


class DuplicateFilter:
    """Filters out duplicates: `for document in duplicate_filter(documents)`; can be called for several sources in turn.

    Of similar documents the first stays. They are compared by the sets of their five-word shingles, ignoring case and
    punctuation; the Jaccard similarity is estimated with a standard deviation of 0.04, see `mlxlm.data.dedup`.
    Exact duplicates are always found; with a threshold of 1, nothing else is. Memory: about 1 kB for each document that
    stays, whatever its length, and the current document.

    Args:
        threshold: Jaccard similarity from which on a document is a duplicate, above 0 and at most 1.

    Attributes:
        stats: What was left out so far.
    """

    def __init__(self, threshold: float):
        self.stats = DedupStats(threshold)
        self._index = MinHashLSH(threshold)

    def __call__(self, documents: Iterable[Document]) -> Generator[Document, None, None]:
        """Yield the documents that repeat no earlier one."""
        for document in documents:
            minhash, digest, size = MinHash(), hashlib.blake2b(digest_size=8), 0
            if document.messages is not None:
                fields = [document.messages, document.tools]
                digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
            pieces = list(document.pieces)
            for text in itertools.chain(pieces, document.contents):
                content = text.encode("utf-8")
                digest.update(content)
                minhash.add(text)
                size += len(content)
                if document.messages is not None:
                    minhash.add(" ")
            duplicate = self._index.add(minhash.signature(digest.digest()), digest.digest())
            self.stats.documents += 1
            if duplicate is None:
                yield replace(document, pieces=iter(pieces))
                continue
            self.stats.exact += duplicate == "exact"
            self.stats.near += duplicate == "near"
            self.stats.bytes += size
