"""The prefix cache against a list of the texts that were inserted."""

import copy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVCache, PrefixCache
from mlxlm.cache.policies import RotationPolicy, SlidingWindow
from mlxlm.kernels import QuantizedKV

H, D, LAYERS, VOCAB = 2, 32, 3, 3
KINDS = {
    "plain": [{}] * 3,
    "quantized": [{"key_bits": 8, "value_bits": 4}] * 3,
    "windowed": [{"window": SlidingWindow(4, slack=3)}] * 3,
    "some layers windowed": [{}, {"window": SlidingWindow(4, slack=3), "key_bits": 8}, {}],
    "rotating": [{"rotation": RotationPolicy(60, 4)}] * 3,
    "rotating and windowed": [{"rotation": RotationPolicy(90, 0)}, {"window": SlidingWindow(3, slack=2)}, {}],
}
VECTORS = np.random.default_rng(0).normal(size=(LAYERS, VOCAB, 320, H, D)).astype(np.float32)  # by token and position


class CountingCache:
    """A cache of another library: a recurrent state, which can't be trimmed."""

    def __init__(self):
        self.offset, self.state = 0, mx.zeros(D)

    def is_trimmable(self):
        return False

    @property
    def nbytes(self):
        return self.state.nbytes

    def update_and_fetch(self, keys, values):
        for t in range(keys.shape[2]):
            self.state = self.state * 0.5 + keys[0, 0, t] - values[0, 1, t]
        self.offset += keys.shape[2]
        return self.state, self.state


KINDS["another library's, trimmable or not"] = [{}, CountingCache, "mlx_lm"]


def make_caches(kind):
    if "mlx_lm" in KINDS[kind]:
        foreign = pytest.importorskip("mlx_lm.models.cache").KVCache
    return [
        KVCache(**made) if isinstance(made, dict) else foreign() if made == "mlx_lm" else made() for made in KINDS[kind]
    ]


def update(caches, ids, begin):
    """What each layer returns for `ids[begin:]`."""
    out = []
    for layer, cache in enumerate(caches):
        x = mx.array(VECTORS[layer, ids[begin:], range(begin, len(ids))].swapaxes(0, 1)[None])
        sides = cache.update_and_fetch(x, -x)
        out += [side.dequantized() if isinstance(side, QuantizedKV) else side for side in sides]
    return [np.array(x) for x in out]


def read(caches, ids, begin=0, size=30):
    while begin < len(ids):
        room = min((getattr(c, "max_update_size", None) or size for c in caches), default=size)
        step = min(size, room, len(ids) - begin)
        update(caches, ids[: begin + step], begin)
        begin += step
    return caches


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


LONGEST = 200  # windows and rotating caches drop tokens long before
texts = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([1, 2, 3, 30, 60])), max_size=4).map(
    lambda runs: [token for token, times in runs for _ in range(times)]
)


class Machine(RuleBasedStateMachine):
    kind: str

    def __init__(self):
        super().__init__()
        self.tree = PrefixCache(lambda: make_caches(self.kind), 1 << 40)
        self.inserted: list[tuple[str, list[int]]] = []  # group and ids, also of texts that were evicted
        self.evicted = False

    @property
    def is_plain(self):
        return self.kind in ("plain", "quantized")

    def text(self, start, cut, ids):
        """A new text that begins like an inserted one."""
        if not self.inserted:
            return ids
        beginning = self.inserted[start % len(self.inserted)][1]
        return (beginning[: max(0, len(beginning) - cut)] + ids)[:LONGEST]

    @rule(
        start=st.integers(0, 99),
        cut=st.sampled_from([0, 0, 1, 5, 40, 99]),
        ids=texts,
        group=st.sampled_from("ab"),
        size=st.sampled_from([7, 40]),
        how=st.sampled_from(["ended", "running", "move"]),
    )
    def insert(self, start, cut, ids, group, size, how):
        ids = self.text(start, cut, ids)
        caches = read(make_caches(self.kind), ids, size=size)
        before = copy.deepcopy([cache.state for cache in caches]) if ids else []
        nbytes = self.tree.nbytes
        self.tree.insert(ids, caches, group, running=how == "running", move=how == "move")
        assert how != "running" or self.tree.nbytes >= nbytes, "a second copy evicts nothing"
        if self.tree.max_bytes == 1 << 40:
            assert self.tree.match(ids, group) == len(ids)
        if ids:
            self.inserted.append((group, ids))
        if ids and how != "move":
            assert all(mx.array_equal(x, y) for x, y in zip(flat(before), flat([c.state for c in caches]), strict=True))

    @rule(
        start=st.integers(0, 99),
        cut=st.sampled_from([0, 0, 1, 5, 40, 99]),
        ids=texts,
        group=st.sampled_from("ab"),
        less=st.integers(0, 9),
        running=st.booleans(),
        max_bytes=st.sampled_from([1 << 40, 200_000, 50_000, 100]),
    )
    def restore(self, start, cut, ids, group, less, running, max_bytes):
        ids = self.text(start, cut, ids)
        n = self.tree.match(ids, group)
        longest = max((common(ids, other) for g, other in self.inserted if g == group), default=0)
        assert n <= longest
        if self.is_plain and not self.evicted:
            assert n == longest
        if less < n and self.tree.match(ids[: n - less], group) == n - less:
            n -= less
        for last in (False, True):  # whatever the first one does to its caches
            if running and last:  # which leaves less memory
                self.tree.max_bytes, self.evicted = min(self.tree.max_bytes, max_bytes), True
            caches = self.tree.restore(ids, n, group, running=running and last)
            expected = read(make_caches(self.kind), ids[:n])
            for i in range(n, n + 4):
                following = [*ids[:n], *[0, 1, 2, 1][: i - n + 1]]
                for found, wanted in zip(update(caches, following, i), update(expected, following, i), strict=True):
                    np.testing.assert_array_equal(found, wanted)
        with pytest.raises(ValueError, match="can't be restored"):
            self.tree.restore(ids, len(ids) + 1, group)

    @rule(part=st.floats(0.3, 1))
    def evict(self, part):
        self.tree.evict(int(self.tree.nbytes * part))
        self.evicted = True

    @rule(max_bytes=st.sampled_from([1 << 40, 1 << 40, 200_000, 100]))
    def limit(self, max_bytes):
        self.tree.max_bytes = max_bytes
        self.tree.evict(max_bytes)
        self.evicted = True

    @rule(ids=texts, group=st.sampled_from("ab"))
    def difference(self, ids, group):
        found = self.tree.first_difference(ids, group)
        if found is not None:
            position, theirs, ours = found
            assert ids[position] == ours != theirs
            shared = [*ids[:position], theirs]
            assert any(group == g and other[: position + 1] == shared for g, other in self.inserted)

    @invariant()
    def bytes_are_those_of_the_nodes(self):
        nodes = list(self.tree._root.subtree())
        total = 0
        for node in nodes:
            for buffers in node.pieces.values():
                assert all(b.shape[2] == len(node.ids) for b in buffers)
                total += sum(b.nbytes for b in buffers)
            total += sum(cache.nbytes for cache in node.snapshots.values()) + 4 * len(node.ids)
            for key, child in node.children.items():
                assert child.parent is node and child.end == node.end + len(child.ids)
                assert node is self.tree._root or key == child.ids[0]
        assert self.tree.nbytes == total <= self.tree.max_bytes
        if not self.inserted:
            assert total == 0

    @invariant()
    def shared_prefixes_are_stored_once(self):
        if self.is_plain:
            prefixes = {(group, *ids[:n]) for group, ids in self.inserted for n in range(1, len(ids) + 1)}
            assert sum(len(node.ids) for node in self.tree._root.subtree()) <= len(prefixes)


def flat(states):
    return [x for state in states for x in (state if isinstance(state, tuple | list) else [state])]


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_match_reading_the_text(kind):
    machine = type("KindMachine", (Machine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=12))


def plain_cache(tokens):
    """A cache that takes about this many tokens."""
    return PrefixCache(lambda: make_caches("plain"), tokens * (LAYERS * 2 * H * D * 4 + 4))


def keep(tree, ids, group=None):
    tree.insert(ids, read(make_caches("plain"), ids), group)


def test_the_least_recently_used_text_is_evicted():
    tree = plain_cache(30)
    shared = [0] * 10
    for last in (0, 1, 2):
        keep(tree, [1, *shared, last, *[0] * 5])
    assert tree.nbytes == plain_cache(10 + 1 + 3 * 6).max_bytes
    tree.restore([1, *shared, 0, 0], 12)  # a use
    keep(tree, [2] * 5)
    assert tree.match([1, *shared, 1]) == 11 and tree.match([1, *shared, 2, 0]) == 13
    assert tree.match([1, *shared, 0, 0]) == 13 and tree.match([2] * 9) == 5
    tree.evict(plain_cache(17).max_bytes)
    assert tree.match([1, *shared, 0, 0]) == 11 and tree.match([2] * 9) == 5
    tree.evict(plain_cache(15).max_bytes)
    assert tree.match([1, *shared, 0, 0]) == 0 and tree.match([2] * 9) == 5
    tree.evict(0)
    assert tree.nbytes == 0 and tree.match([1, *shared]) == 0 and not tree._root.children


def test_a_text_that_does_not_fit_is_not_kept_and_evicts_nothing():
    tree = plain_cache(20)
    keep(tree, [1] * 12)
    keep(tree, [2] * 21)
    assert tree.match([2] * 21) == 0 and tree.match([1] * 12) == 12
    keep(tree, [1] * 20)  # the same text, longer
    assert tree.match([1] * 20) == 20 and tree.nbytes == tree.max_bytes
    tree.insert([], make_caches("plain"))
    assert tree.match([]) == 0 and tree.restore([], 0)[0].offset == 0


def test_what_is_here_already_is_not_copied():
    tree = plain_cache(100)
    keep(tree, [1] * 10)
    (node,) = tree._root.children[None].children.values()
    before = node.pieces[0][0]
    keep(tree, [1] * 10 + [2])
    assert node.pieces[0][0] is before and node.children[2].pieces[0][0].capacity == 1


def test_the_second_copy_of_a_running_text_is_evicted_first_and_evicts_nothing():
    tree = plain_cache(30)
    keep(tree, [1] * 10)
    keep(tree, [2] * 10)
    tree.restore([1] * 10, 10, running=True)
    tree.evict(plain_cache(15).max_bytes)
    assert tree.match([1] * 10) == 0 and tree.match([2] * 10) == 10
    tree.insert([0] * 21, read(make_caches("plain"), [0] * 21), running=True)
    assert tree.match([0] * 21) == 0 and tree.match([2] * 10) == 10
    tree.insert([0] * 20, read(make_caches("plain"), [0] * 20), running=True)
    assert tree.match([0] * 20) == 20
    tree.evict(plain_cache(15).max_bytes)
    assert tree.match([0] * 20) == 0 and tree.match([2] * 10) == 10
    keep(tree, [0] * 20)
    keep(tree, [1] * 10)
    assert tree.match([0] * 20) == 20 and tree.match([2] * 10) == 0, "the text has ended: it was used after the other"


@pytest.mark.skipif(not ON_CPU, reason="other tests may free memory of the device")
def test_memory_never_has_a_text_twice_that_is_moved():
    """Neither when a running text takes all of it, nor at its end."""
    shape, layers = (1, 1, 1024, 512), 8
    tree = PrefixCache(lambda: [KVCache() for _ in range(layers)], 1 << 40)
    caches = tree.restore([1] * 1024, 0)
    for cache in caches:
        cache.update_and_fetch(mx.ones(shape), mx.ones(shape))
    mx.eval([cache.state for cache in caches])
    before, layer = mx.get_active_memory(), 2 * 1024 * 512 * 4

    def most(change):
        mx.reset_peak_memory()
        change()
        return (mx.get_peak_memory() - before) / layer

    assert most(lambda: tree.insert([1] * 1024, caches, move=True)) < 2.5
    assert caches == [None] * layers and tree.match([1] * 1024) == 1024
    tree.max_bytes = layer // 2

    def restore():
        caches[:] = tree.restore([1] * 1024, 1024, running=True)

    assert most(restore) < 2.5
    assert tree.match([1] * 1024) == 0 and caches[7].offset == 1024 and float(caches[7].state[1].min()) == 1


def test_left_padding_is_not_kept():
    caches = make_caches("plain")
    for cache in caches:
        cache.set_left_padding([3])
    update(caches, [2, 2, 2, 1, 0], 0)
    tree = plain_cache(100)
    tree.insert([1, 0], caches)
    keys, _ = tree.restore([1, 0], 2)[1].update_and_fetch(*[mx.zeros((1, H, 1, D))] * 2)
    np.testing.assert_array_equal(np.array(keys)[0, :, :2], VECTORS[1, [1, 0], [3, 4]].swapaxes(0, 1))


def test_first_difference_at_a_branch_names_the_text_used_last():
    tree = plain_cache(100)
    keep(tree, [1, 2, 0])
    keep(tree, [1, 1])
    assert tree.first_difference([1, 0, 0]) == (1, 1, 0)
    tree.restore([1, 2], 2)
    assert tree.first_difference([1, 0, 0]) == (1, 2, 0)


@pytest.mark.skipif(not ON_CPU, reason="other tests may free memory of the device")
def test_evicted_texts_free_their_memory():
    tree = PrefixCache(lambda: [KVCache()], 1 << 40)

    def rows(ids):  # of a large batch
        x = mx.ones((4, 1, len(ids), 512))
        cache = KVCache()
        cache.update_and_fetch(x, x)
        return [cache.row(2)]

    before = mx.get_active_memory()
    one, other = [1] * 900, [1] * 500 + [2] * 400
    tree.insert(one, rows(one))
    tree.insert(other, rows(other))
    assert tree.nbytes == 1300 * (2 * 512 * 4 + 4)
    assert mx.get_active_memory() - before < tree.nbytes + 50_000  # neither the batch nor what was split
    tree.restore(one, 900)
    tree.evict(900 * (2 * 512 * 4 + 4))
    assert tree.match(one) == 900 and tree.match(other) == 500
    assert mx.get_active_memory() - before < 900 * 2 * 512 * 4 + 50_000
    tree.clear()
    assert mx.get_active_memory() - before < 50_000
    tree.insert(other, rows(other))
    tree.insert(one, rows(one))
    del tree
    assert mx.get_active_memory() - before < 50_000


def test_a_long_conversation_evicts_its_old_snapshots_first():
    kind, ids, ends = "windowed", [], []
    tree = PrefixCache(lambda: make_caches(kind), 1 << 40)
    for turn in range(4):
        ids += [turn % VOCAB] * 75
        tree.insert(ids, read(make_caches(kind), ids))
        ends.append(len(ids))
    assert [tree.match(ids[:end]) for end in ends] == ends
    tree.restore(ids, ends[1])
    tree.evict(tree.nbytes - 1)
    assert [tree.match(ids[:end]) for end in ends] == [0, *ends[1:]]
    tree.evict(tree.nbytes - 1)
    assert [tree.match(ids[:end]) for end in ends] == [0, 150, 150, 300]


def test_an_interrupted_insert_leaves_an_empty_cache(monkeypatch):
    tree = plain_cache(100)
    keep(tree, [1] * 10)
    caches = read(make_caches("plain"), [1, 2, 2])

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxlm.cache.kv_cache.KVCache.slice_tokens", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tree.insert([1, 2, 2], caches)
    assert tree.nbytes == 0 and tree.match([1] * 10) == 0


def test_a_snapshot_outlives_a_continuation_that_was_used_less():
    tree, text = PrefixCache(lambda: make_caches("windowed"), 1 << 40), [1] * 150
    for ids in (text, [*text, *[2] * 75]):
        tree.insert(ids, read(make_caches("windowed"), ids))
    tree.restore(text, 150)
    tree.evict(tree.nbytes - 1)
    assert tree.match([*text, *[2] * 75]) == 150
