"""Keeps keys and values of texts that were read, so that a prompt that begins like one of them isn't read again.

The texts form a radix tree over token ids: what several texts begin with is stored once (as in Zheng et al. 2023,
"SGLang: Efficient Execution of Structured Language Model Programs", section 3).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from heapq import heapify, heappop, heappush
from itertools import compress, count
from operator import ne
from typing import Any
from weakref import ref

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.prefix_cache_folder import PrefixCacheFolder
from mlxlm.cache.prompt_cache_file import FileCache

_MIN_LOADED = 64  # tokens that the folder must have beyond those in memory
_MIN_SAVED = 256  # tokens of a text that is written: shorter ones are read again as fast


class PrefixCache:
    """Keys and values of texts, at most `max_bytes` of them; the least recently used are evicted.

    A running text has caches of its own. What is kept of it is a second copy, which is evicted before everything else,
    and isn't made if something would have to be evicted for it. Not thread-safe: arrays belong to the thread that uses
    the model.

    Args:
        make_caches: Makes the empty caches of the model, one per layer.
        max_bytes: Maximum of `nbytes`. May be changed at any time; `evict` then makes that true.
        folder: Where what is evicted is kept.

    Attributes:
        nbytes: Bytes of everything that is kept.
    """

    def __init__(
        self, make_caches: Callable[[], list[Any]], max_bytes: int, folder: PrefixCacheFolder | None = None
    ) -> None:
        self._make_caches, self.max_bytes, self._folder = make_caches, max_bytes, folder
        self._num_layers = len(make_caches())
        self.clear()

    def clear(self) -> None:
        """Forget all texts, except for those in the folder."""
        self._root, self.nbytes, self._clock = _Node(array("i"), None, None), 0, count(1)

    def match(self, ids: Sequence[int], group: Hashable = None) -> int:
        """How many of the first tokens of `ids` can be restored.

        If the folder has many more of them than memory, they are loaded.

        Args:
            ids: A text. To get logits from the model, leave out its last token, which has to be read again.
            group: Texts of different groups share nothing.
        """
        ids = array("i", ids)
        found = self._find(ids, group)[0]
        if self._folder is None or len(ids) < found + _MIN_LOADED:
            return found
        if self._folder.match(ids, group, self.max_bytes) >= found + _MIN_LOADED:
            n, caches = self._folder.load(ids, group, self.max_bytes)
            self.insert(ids[:n], caches, group, move=True)
            found = self._find(ids, group)[0]
        return found

    def first_difference(self, ids: Sequence[int], group: Hashable = None) -> tuple[int, int, int] | None:
        """Where `ids` leaves the text that begins most like it: the position, that text's token, and the one of `ids`.

        None if no text begins with the same token, or if one is a prefix of the other.
        """
        path, depth = self._walk(ids := array("i", ids), group)
        if not depth or depth == len(ids):
            return None
        node = path[-1]
        if depth < node.end:
            return depth, node.ids[depth - node.start], ids[depth]
        following = max(node.children.values(), key=lambda child: child.used, default=None)
        return None if following is None else (depth, following.ids[0], ids[depth])

    def restore(self, ids: Sequence[int], n: int, group: Hashable = None, *, running: bool = False) -> list[Any]:
        """Make caches that hold the first `n` tokens of `ids`, with room for the others.

        Whatever is written to them, nothing changes here. `KVCache.long_factors` is left to the caller.

        Args:
            ids: A text.
            n: `match(ids)`, or less if `match(ids[:n])` is `n`: layers that drop tokens can't be cut anywhere.
            group: As in `match`.
            running: The text begins to run, and is inserted again at its end. If `max_bytes` has no room for a second
                copy of what no other text shares, that is moved to the caches, layer by layer.

        Raises:
            ValueError: `n` tokens can't be restored.
        """
        ids = array("i", ids)
        found, path, source = self._find(ids[: max(n, 0)], group)
        if found != n:
            raise ValueError(f"{n} tokens can't be restored, only {found}")
        self._touch(path, source)
        if not running or source is not None:
            caches = self._build(ids, n, path, source)
            self.evict(self.max_bytes)
            return caches
        unshared = self._unshared(path)
        self.evict(self.max_bytes + sum(node.nbytes for node in unshared))  # these were used last
        if self.nbytes <= self.max_bytes:
            caches = self._build(ids, n, path, source)
            self._evict_first(unshared)
            return caches
        try:
            caches = self._build(ids, n, path, source, unshared)
            self._cut(unshared[-1])
        except BaseException:  # an interrupt in the middle
            self.clear()
            raise
        return caches

    def insert(
        self,
        ids: Sequence[int],
        caches: list[Any],
        group: Hashable = None,
        *,
        running: bool = False,
        move: bool = False,
    ) -> None:
        """Keep a text. Only what isn't here yet is copied. A text of more than `max_bytes` is not kept.

        Layers that drop tokens can later be restored where a text ends that was inserted, and a few tokens before
        that, so insert a text again after its prompt, its answer, and where another one may leave it.

        Args:
            ids: All tokens of the text.
            caches: Caches of one row that hold exactly these tokens.
            group: As in `match`.
            running: Generation continues with these caches, which must not drop tokens.
            move: Empty the list `caches`, layer by layer, so that memory never holds two copies.
        """
        ids = array("i", ids)
        found, path, source = self._find(ids, group)
        if found < len(ids):
            sizes = [(cache.row(0) if hasattr(cache, "row") else cache).nbytes for cache in caches]
            nbytes = sum(sizes, ids.itemsize * len(ids))
            missing = nbytes * (len(ids) - self._walk(ids, group)[1]) // len(ids)
            if running and self.nbytes + missing > self.max_bytes:
                return
        self._touch(path, source)
        if found < len(ids):
            if nbytes > self.max_bytes:
                return
            self.evict(self.max_bytes - missing)  # before, so that memory holds no more than `max_bytes`
            try:
                path = self._insert(ids, caches, group, move)
            except BaseException:  # an interrupt in the middle
                self.clear()
                raise
            self.evict(self.max_bytes)
        if running:
            self._evict_first(self._unshared(path))

    def evict(self, max_bytes: int) -> None:
        """Remove what wasn't used for longest until at most `max_bytes` are left."""
        if self.nbytes <= max_bytes:
            return
        order = count()  # nodes can't be compared
        candidates = (node for node in self._root.subtree() if node.parent and (node.snapshots or not node.children))
        queue = [(node.eviction_time, next(order), node) for node in candidates]
        heapify(queue)
        while self.nbytes > max_bytes and queue:
            *_, node = heappop(queue)
            if node.parent is None:  # already removed
                continue
            self._save(node)
            if node.children:
                node.snapshots = {}
                self.nbytes += node.count_bytes()
            else:
                parent = self._remove(node)
                heappush(queue, (parent.eviction_time, next(order), parent))

    def _save(self, node: _Node) -> None:
        """Write what the eviction of `node` removes to the folder, unless it is there."""
        if self._folder is None or node.end < _MIN_SAVED:
            return
        ids, group = node.text, node.group
        if self._folder.match(ids, group) == len(ids):
            return
        self._folder.save(ids, node.snapshots, group)
        if not node.children:
            found, path, source = self._find(ids, group)
            if found == len(ids):
                caches = enumerate(self._build(ids, found, path, source))
                self._folder.save(ids, {i: cache for i, cache in caches if i not in node.snapshots}, group)

    def _remove(self, node: _Node) -> _Node:
        """Remove a leaf, and the nodes above it that are of no use without it. Return the lowest that is left."""
        while True:
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self.nbytes -= node.nbytes
            node.parent = None
            node = parent
            if node.parent is None or node.children or node.snapshots or (node.ids and self._is_complete(node)):
                return node

    def _walk(self, ids: array[int], group: Hashable) -> tuple[list[_Node], int]:
        """The nodes that `ids` passes through, the last one perhaps not to its end, and how many tokens they share."""
        path: list[_Node] = []
        depth, node = 0, self._root.children.get(group)
        while node is not None:
            path.append(node)
            depth += common_prefix_length(node.ids, ids[depth : depth + len(node.ids)])
            if depth < node.end or depth == len(ids):
                break
            node = node.children.get(ids[depth])
        return path, depth

    def _find(self, ids: array[int], group: Hashable) -> tuple[int, list[_Node], _Node | None]:
        """How many tokens can be restored, their nodes, and the node whose snapshots that takes (None: none)."""
        path, depth = self._walk(ids, group)
        while path:
            if all(map(self._is_complete, path)):
                return depth, path, None
            for node in path[-1].subtree():
                if node.snapshots and node.restorable_from <= depth:
                    return depth, path, node
            depth = path.pop().start
        return 0, [], None

    def _build(
        self, ids: array[int], n: int, path: Sequence[_Node], source: _Node | None, moved: Sequence[_Node] = ()
    ) -> list[Any]:
        """Make caches of the first `n` tokens of `ids` from what `_find` found. The nodes `moved` lose their pieces."""
        caches = self._make_caches()
        if n == 0:
            return caches
        last = n - path[-1].start
        for layer, cache in enumerate(caches):
            if source is None or layer not in source.snapshots:
                pieces = [node.pieces[layer] for node in path if node.ids]
                pieces[-1] = [buffer.map_arrays(lambda x: x[:, :, :last]) for buffer in pieces[-1]]
                cache.fill(pieces, len(ids) - n)
                if moved:
                    mx.eval(cache.state)
                    pieces.clear()
                    for node in moved:
                        node.pieces.pop(layer, None)
            else:
                snapshot = source.snapshots[layer]
                caches[layer] = snapshot.copy() if hasattr(snapshot, "copy") else deepcopy(snapshot)
                if source.end > n:
                    caches[layer].trim(source.end - n)
        mx.eval([cache.state for cache in caches])
        return caches

    def _is_complete(self, node: _Node) -> bool:
        """Whether a node has the keys and values of all layers, so that it can be cut at any token."""
        return not node.ids or len(node.pieces) == self._num_layers

    def _touch(self, path: Sequence[_Node], source: _Node | None) -> None:
        """Mark nodes as used, and the snapshots of `source`."""
        now = next(self._clock)
        for node in path:
            node.used = now
        if source is not None:
            source.used = source.snapshots_used = now

    def _unshared(self, path: Sequence[_Node]) -> list[_Node]:
        """The nodes of a path that no text has which leaves the path before its end, from the last one upwards."""
        nodes = list(path[-1:])
        for node in reversed(path[:-1]):
            if len(node.children) > 1:
                break
            nodes.append(node)
        return nodes

    def _evict_first(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            node.used = 0

    def _cut(self, node: _Node) -> None:
        """Remove a node and all below it."""
        assert node.parent is not None
        del node.parent.children[node.key]
        self.nbytes -= sum(below.nbytes for below in node.subtree())
        node.parent = None

    def _insert(self, ids: array[int], caches: list[Any], group: Hashable, move: bool) -> list[_Node]:
        """Add a text; returns its nodes."""
        path, depth = self._walk(ids, group)
        if not path:
            path = [_Node(array("i"), self._root, group)]
        if depth < path[-1].end:
            lower = path[-1]
            path[-1] = lower.split(depth)
            self.nbytes += lower.count_bytes()
        if depth < len(ids):
            path.append(_Node(ids[depth:], path[-1], ids[depth]))
        last, snapshots, new = path[-1], dict[int, Any](), list[Any]()
        for layer, cache in enumerate(caches):
            if isinstance(cache, KVCache) and cache.holds_all_tokens:
                for node in path:
                    if node.ids and layer not in node.pieces:
                        node.pieces[layer] = cache.slice_tokens(node.start, node.end)
                        new += [buffer.arrays for buffer in node.pieces[layer]]
            else:
                snapshots[layer] = _copy(cache)
                new.append(snapshots[layer].state)
            if move:
                mx.eval(new)
                new.clear()
                caches[layer] = cache = None
        mx.eval(new)
        last.snapshots = snapshots
        last.restorable_from = max(
            (last.end - _num_trimmable(cache, last.end) for cache in last.snapshots.values()), default=0
        )
        self.nbytes += sum(node.count_bytes() for node in path)
        self._touch(path, last)
        return path


class _Node:
    """Consecutive tokens that all texts below it share.

    A layer that holds all tokens has its keys and values of these tokens in `pieces`. One that has dropped some, or is
    of mlx_lm's own types, can't be cut at any token: its whole cache is in `snapshots`, if a text was inserted that
    ends where the node ends.

    Attributes:
        ids: The tokens.
        end: Number of tokens from the root up to the end of this node.
        pieces: Keys and values by layer.
        snapshots: Caches by layer.
        restorable_from: The snapshots can be trimmed to this many tokens.
        used: Time of the last use.
        snapshots_used: Time of the last use of the snapshots.
    """

    __slots__ = (
        "__weakref__", "_parent", "ids", "end", "key", "children", "pieces", "snapshots", "restorable_from", "nbytes",
        "used", "snapshots_used",
    )  # fmt: skip

    def __init__(self, ids: array[int], parent: _Node | None, key: Hashable) -> None:
        self.ids, self.parent, self.key = ids, parent, key
        self.end: int = len(ids) + (parent.end if parent else 0)
        self.children: dict[Hashable, _Node] = {}  # by first token; those of the root by group
        self.pieces: dict[int, list[KVBuffer]] = {}
        self.snapshots: dict[int, Any] = {}
        self.restorable_from = self.nbytes = self.used = self.snapshots_used = 0
        if parent is not None:
            parent.children[key] = self

    @property
    def parent(self) -> _Node | None:
        """The node above this one; None for the root and for a removed node."""
        return None if self._parent is None else self._parent()

    @parent.setter
    def parent(self, node: _Node | None) -> None:
        # Weak, so that a tree without references is freed at once, not by the next garbage collection.
        self._parent = None if node is None else ref(node)

    @property
    def start(self) -> int:
        """Number of tokens before this node."""
        return self.end - len(self.ids)

    @property
    def eviction_time(self) -> int:
        """Last use of what an eviction would remove: all of a leaf, the snapshots of another node."""
        return self.snapshots_used if self.children else self.used

    @property
    def text(self) -> array[int]:
        """All tokens from the root to the end of this node."""
        ids, node = array("i"), self
        while node.parent is not None:
            ids, node = node.ids + ids, node.parent
        return ids

    @property
    def group(self) -> Hashable:
        """The group of the text."""
        node = self
        while node.ids and node.parent is not None:
            node = node.parent
        return node.key

    def subtree(self) -> Iterator[_Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(node.children.values())

    def split(self, depth: int) -> _Node:
        """Make this node begin at `depth` tokens; return a new one above it that ends there."""
        size = depth - self.start
        upper = _Node(self.ids[:size], self.parent, self.key)  # replaces this one there
        for layer, buffers in self.pieces.items():
            upper.pieces[layer] = [buffer.slice_row(0, 0, size) for buffer in buffers]
            self.pieces[layer] = [buffer.slice_row(0, size, buffer.capacity) for buffer in buffers]
            # One layer at a time, so that the arrays that were cut don't all stay in memory.
            mx.eval([buffer.arrays for buffer in upper.pieces[layer] + self.pieces[layer]])
        upper.used = self.used
        self.ids, self.parent, self.key = self.ids[size:], upper, self.ids[size]
        upper.children[self.key] = self
        return upper

    def count_bytes(self) -> int:
        """Update `nbytes` after a change. Return the difference."""
        buffers = sum(buffer.nbytes for layer in self.pieces.values() for buffer in layer)
        snapshots = sum(cache.nbytes for cache in self.snapshots.values())
        before, self.nbytes = self.nbytes, len(self.ids) * self.ids.itemsize + buffers + snapshots
        return self.nbytes - before


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both sequences begin with."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))


def _copy(cache: Any) -> Any:
    return cache.compact_copy() if hasattr(cache, "compact_copy") else deepcopy(cache)


def _num_trimmable(cache: Any, length: int) -> int:
    """How many of its last tokens a cache of `length` tokens can drop. mlx_lm's caches: all, or none to be safe."""
    if isinstance(cache, FileCache):
        return cache.num_trimmable
    return length if cache.is_trimmable() and deepcopy(cache).trim(length) == length else 0
