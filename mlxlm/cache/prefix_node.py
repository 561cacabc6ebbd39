"""A node of the prefix cache's tree."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import Any
from weakref import ref

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer


class PrefixNode:
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

    def __init__(self, ids: array[int], parent: PrefixNode | None, key: Hashable) -> None:
        self.ids, self.parent, self.key = ids, parent, key
        self.end: int = len(ids) + (parent.end if parent else 0)
        self.children: dict[Hashable, PrefixNode] = {}  # by first token; those of the root by group
        self.pieces: dict[int, list[KVBuffer]] = {}
        self.snapshots: dict[int, Any] = {}
        self.restorable_from = self.nbytes = self.used = self.snapshots_used = 0
        if parent is not None:
            parent.children[key] = self

    @property
    def parent(self) -> PrefixNode | None:
        """The node above this one; None for the root and for a removed node."""
        return None if self._parent is None else self._parent()

    @parent.setter
    def parent(self, node: PrefixNode | None) -> None:
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

    def subtree(self) -> Iterator[PrefixNode]:
        """This node and all below it."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack.extend(node.children.values())

    def split(self, depth: int) -> PrefixNode:
        """Make this node begin at `depth` tokens; return a new one above it that ends there."""
        size = depth - self.start
        upper = PrefixNode(self.ids[:size], self.parent, self.key)  # replaces this one there
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
