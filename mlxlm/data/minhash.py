"""How alike texts are: MinHash signatures, and an index that finds the like of one by locality-sensitive hashing.

A text is the set of its shingles, runs of five words; a word is a run of letters and digits, in lower case, or one
character of Chinese, Japanese or Korean. The Jaccard similarity of two texts, the number of shingles in both by that of
those in either, is estimated by the share of 128 hash functions whose least values over the shingles agree (Broder, "On
the resemblance and containment of documents", 1997): unbiased, with a standard deviation of at most 0.044. Candidates
are texts with all minima of a band of them in common (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets",
section 3.4).
"""

from __future__ import annotations

import re
import zlib

import numpy as np

NUM_HASHES = 128
_WORDS = 5  # of a shingle: GPT-3's and The Pile's filters take 5 to 13; the shorter, the more survives an edit
_ONE_WORD = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_ONE_WORD}]|[^\\W_{_ONE_WORD}]+")
_CUT = re.compile(r"\s\S*\Z")
_LONGEST_WORD = 1 << 16  # characters: longer runs without a space are cut, so that no text waits for one
_BLOCK = 512  # shingles hashed at once: [512, 128] uint64 stays in a core's cache
_MISSED = 0.02  # of pairs just as similar as the threshold, the largest share that no band finds
_DEEPEST = 64  # texts of one bucket that are looked at, the latest: a bucket of thousands would be read for each text

_random = np.random.default_rng(0x5EED)
_FACTORS = _random.integers(0, 1 << 64, (2, NUM_HASHES), np.uint64) | np.uint64(1)
_ORDER = _random.integers(0, 1 << 64, _WORDS, np.uint64) | np.uint64(1)


class MinHash:
    """The minima over one text, which is given in any number of pieces."""

    def __init__(self) -> None:
        self._rest = ""  # of a word that may go on
        self._words = np.empty(0, np.uint64)  # hashes of the last words, which are part of shingles to come
        self._least = np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
        self._any = False

    def add(self, piece: str) -> None:
        text = self._rest + piece
        cut = _CUT.search(text, max(0, len(text) - _LONGEST_WORD))
        at = cut.start() if cut else len(text) if len(text) > _LONGEST_WORD else 0
        self._rest = text[at:]
        self._take(text[:at])

    def min_hashes(self, otherwise: bytes) -> np.ndarray:
        """uint64 `[128]`. A text of fewer than five words is one shingle; one without words is told apart by the 8
        bytes of `otherwise` alone."""
        self._take(self._rest)
        if not self._any:
            whole = self._words if len(self._words) else np.frombuffer(otherwise, np.uint64)
            self._hash(_mixed((whole * _ORDER[: len(whole)]).sum(keepdims=True)))
        return self._least

    def _take(self, text: str) -> None:
        found = [zlib.crc32(word.encode("utf-8")) for word in _WORD.findall(text.lower())]
        words = np.concatenate([self._words, np.array(found, np.uint64)])
        count = len(words) - _WORDS + 1
        if count > 0:
            self._hash(_mixed(sum(words[i : i + count] * _ORDER[i] for i in range(_WORDS))))
            self._any = True
        self._words = words[max(0, count) :]

    def _hash(self, shingles: np.ndarray) -> None:
        for start in range(0, len(shingles), _BLOCK):
            values = shingles[start : start + _BLOCK, None] * _FACTORS[0] + _FACTORS[1]
            np.minimum(self._least, values.min(axis=0), out=self._least)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014), so that every bit depends on every word."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class MinHashLSH:
    """Texts that are less similar to each other than `threshold`.

    A threshold of 1 compares digests alone. Memory: a text takes about 100 bytes of its digest, 256 of its signature
    (16 bits of each minimum), and with b bands 8·b for buckets and links (b = 18 at 0.8), in tables that double when
    they are full.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        # As many rows a band as find all but a few pairs of the threshold's similarity: the fewer false candidates.
        self._rows = max((r for r in range(1, 33) if (1 - threshold**r) ** (NUM_HASHES // r) <= _MISSED), default=1)
        self._bands = NUM_HASHES // self._rows
        self._count = 0
        self._seen: set[bytes] = set()
        self._allocate(1024)

    def add(self, min_hashes: np.ndarray, digest: bytes) -> bool | None:
        """Add a text if no other is like it: None. Otherwise whether another has the same `digest`."""
        if digest in self._seen:
            return True
        if self._threshold < 1 and self._is_near(min_hashes):
            return False
        self._seen.add(digest)
        return None

    def _is_near(self, min_hashes: np.ndarray) -> bool:
        """Whether the minima are those of a text much like one before; if not, they are added."""
        # The upper bits of a minimum are small for all long texts; the lowest of a product depend on few others.
        signature = (min_hashes >> np.uint64(24)).astype(np.uint16)
        buckets = self._buckets(signature[None])[0]
        candidates = self._candidates(buckets)
        if len(candidates) and (self._signatures[candidates] == signature).mean(axis=1).max() >= self._threshold:
            return True
        if self._count == len(self._signatures):
            self._allocate(2 * self._count)
            buckets = self._buckets(signature[None])[0]
        self._signatures[self._count] = signature
        self._link(self._count, buckets)
        self._count += 1
        return False

    def _allocate(self, capacity: int) -> None:
        signatures = np.empty((capacity, NUM_HASHES), np.uint16)
        if self._count:
            signatures[: self._count] = self._signatures
        self._signatures = signatures
        self._next = np.zeros((capacity, self._bands), np.uint32)  # the text before in the same bucket, + 1
        self._heads = np.zeros((self._bands, capacity), np.uint32)  # the last text of each bucket, + 1
        for start in range(0, self._count, 4096):
            for i, buckets in enumerate(self._buckets(signatures[start : min(start + 4096, self._count)]), start):
                self._link(i, buckets)

    def _buckets(self, signatures: np.ndarray) -> np.ndarray:
        """int `[N, bands]`: the bucket of each band of each signature `[N, 128]`."""
        used = signatures[:, : self._bands * self._rows].reshape(-1, self._bands, self._rows).astype(np.uint64)
        keys = (used * _FACTORS[0, : self._rows]).sum(axis=2) + _FACTORS[1, : self._bands]
        return (_mixed(keys) & np.uint64(self._heads.shape[1] - 1)).astype(np.int64)

    def _link(self, text: int, buckets: np.ndarray) -> None:
        bands = np.arange(self._bands)
        self._next[text] = self._heads[bands, buckets]
        self._heads[bands, buckets] = text + 1

    def _candidates(self, buckets: np.ndarray) -> np.ndarray:
        found = []
        bands = np.arange(self._bands)
        texts = self._heads[bands, buckets]
        for _ in range(_DEEPEST):
            bands, texts = bands[texts > 0], texts[texts > 0].astype(np.int64) - 1
            if not len(texts):
                break
            found.append(texts)
            texts = self._next[texts, bands]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
