"""Caches of every kind against lists of tokens, their options, and their buffers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVCache, KVOptions
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.policies import RotationPolicy, SlidingWindow
from mlxlm.kernels import QuantizedKV
from mlxlm.utils.errors import GenerationError
from tests.graphs import operations

H, D = 2, 32
KINDS = {
    "full": {},
    "rotating": {"rotation": RotationPolicy(13, 3)},
    "rotating without sinks": {"rotation": RotationPolicy(40, 0)},
    "windowed": {"window": SlidingWindow(5, slack=4)},
    "quantized": {"key_bits": 8, "value_bits": 4},
    "keys quantized": {"key_bits": 4},
    "rotating, quantized": {"rotation": RotationPolicy(30, 4), "key_bits": 4, "value_bits": 8},
    "windowed, quantized": {"window": SlidingWindow(70, slack=8), "value_bits": 8},
}


class Text:
    """The tokens that one row must hold, in order."""

    def __init__(self):
        self.tokens: list[int] = []
        self.read = 0  # tokens in total

    def copy(self):
        other = Text()
        other.tokens, other.read = list(self.tokens), self.read
        return other

    @property
    def lost(self):
        return self.read - len(self.tokens)


VECTORS = np.random.default_rng(0).normal(size=(H, 4096, D)).astype(np.float32)  # of each token


def vectors(tokens, bits, sign):
    """Keys or values `[H, n, D]` of tokens, as the cache holds them."""
    x = sign * mx.array(VECTORS[None, :, tokens])
    if bits is not None and tokens:
        form = {"group_size": 32, "bits": bits}
        x = mx.dequantize(*mx.quantize(x, **form), **form)
    return np.array(x[0])


class Pair:
    """A cache and its expected contents."""

    def __init__(self, kind, texts=None, cache=None):
        self.kind, self.texts = kind, texts or [Text()]
        self.cache = cache or KVCache(**KINDS[kind])
        self.rotation, self.window = self.cache.rotation, self.cache.window
        self.counter = 0

    def add(self, count, pads=None):
        if self.rotation is not None:
            assert self.cache.max_update_size == min(
                self.rotation.max_update_size(len(text.tokens)) for text in self.texts
            )
            count = min(count, self.cache.max_update_size)
        pads = [0] * len(self.texts) if pads is None else [min(pad, count) for pad in pads]
        pads = [0 if text.read else pad for text, pad in zip(self.texts, pads, strict=True)]
        before = [text.read for text in self.texts]
        if any(pads):
            self.cache.set_left_padding(pads)
            assert self.cache.offsets == [n - pad for n, pad in zip(before, pads, strict=True)]
        added = []
        for text, pad in zip(self.texts, pads, strict=True):
            new = [int(t) for t in np.random.default_rng(self.counter).integers(1, len(VECTORS[0]), count - pad)]
            self.counter += 1
            rule = self.rotation
            if rule is not None and len(text.tokens) + len(new) > rule.size:
                del text.tokens[rule.keep : rule.keep + rule.step]
            text.tokens += new
            text.read += len(new)
            added.append([0] * pad + new)
        raw = [np.stack([vectors(row, None, sign) for row in added]) for sign in (1, -1)]
        sides = self.cache.update_and_fetch(*(mx.array(x) for x in raw))
        self.check(sides, count)

    def check(self, sides, count):
        first = [0] * len(self.texts) if self.cache.first is None else self.cache.first.tolist()
        bits = self.cache.key_bits, self.cache.value_bits
        for side, sign, b in zip(sides, (1, -1), bits, strict=True):
            assert isinstance(side, QuantizedKV) == (b is not None)
            held = np.array(side.dequantized() if b is not None else side)
            assert held.shape[2] >= count
            for row, text in enumerate(self.texts):
                wanted = text.tokens
                if self.window is not None:
                    wanted = wanted[-(self.window.size - 1 + count) :]
                np.testing.assert_array_equal(held[row, :, first[row] :], vectors(wanted, b, sign))
        self.check_counts()

    def check_counts(self):
        reads = [text.read for text in self.texts]
        assert self.cache.offsets == reads
        offset = self.cache.offset
        assert offset == reads[0] if len(reads) == 1 else offset.tolist() == reads
        assert self.cache.rows == len(reads)
        if self.rotation is not None:
            assert self.cache.size() == max(len(text.tokens) for text in self.texts) <= self.rotation.size

    def trim(self, n):
        most = min(len(text.tokens) if self.window is None else text.read for text in self.texts)
        if self.cache.can_trim(n):
            done = self.cache.trim(n)
            assert done == min(n, most)
            for text in self.texts:
                text.read -= done
                del text.tokens[len(text.tokens) - done :]
            return
        assert not self.cache.is_trimmable()
        if self.rotation is not None:  # exactly where the tokens before the trimmed ones are gone
            left = self.rotation.size - self.rotation.step
            assert any(text.lost and len(text.tokens) - n < left for text in self.texts)
        with pytest.raises(GenerationError, match="can't trim"):
            self.cache.trim(n)
        self.check_counts()


moves = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30)),
    st.tuples(st.just("one by one"), st.integers(1, 12)),
    st.tuples(st.just("pad"), st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(1, 12)),
    st.tuples(st.just("trim"), st.integers(0, 9)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("merge"), st.integers(0, 20)),
    st.tuples(st.just("replace"), st.integers(0, 3), st.integers(1, 20)),
    st.tuples(st.just("fork"), st.integers(1, 5)),
    st.tuples(st.just("row"), st.integers(0, 3), st.integers(1, 5)),
    st.tuples(st.just("state")),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data(), todo=st.lists(moves, min_size=1, max_size=10))
def test_random_operations_match_lists_of_tokens(kind, data, todo):
    pair = Pair(kind)
    pair.counter = data.draw(st.integers(0, 1 << 20))
    for move, *args in todo:
        if move == "add":
            pair.add(args[0])
        elif move == "one by one":
            for _ in range(args[0]):
                pair.add(1)
        elif move == "pad":
            pair.add(args[1], args[0][: len(pair.texts)])
        elif move == "trim":
            pair.trim(args[0])
        elif move == "select" and pair.cache.state:
            rows = [row % len(pair.texts) for row in args[0]]
            pair.cache.select(rows)
            pair.texts = [pair.texts[row].copy() for row in rows]
            pair.check_counts()
        elif move == "merge" and len(pair.texts) < 4:
            other = Pair(kind)
            other.counter = pair.counter + 1000
            for _ in range(args[0]):
                other.add(1)
            merged = KVCache.merge([pair.cache, other.cache])
            pair.cache, pair.texts = merged, pair.texts + other.texts
            pair.check_counts()
        elif move == "replace":
            index, other = args[0] % len(pair.texts), Pair(kind)
            other.counter = pair.counter + 2000
            for _ in range(args[1]):
                other.add(1)
            if pair.cache.can_replace_rows(other.cache):
                pair.cache.replace_rows([index], other.cache)
                pair.texts[index] = other.texts[0]
                pair.check_counts()
                pair.add(1)
            else:
                assert pair.rotation is not None or other.cache.size() > max(len(text.tokens) for text in pair.texts)
        elif move == "fork":  # whatever is written to a copy, this one is unchanged
            other = Pair(kind, [text.copy() for text in pair.texts], pair.cache.copy())
            other.counter = pair.counter + 77
            for _ in range(args[0]):
                other.add(2)
        elif move == "row":  # one text alone; whatever is written to it, this cache is unchanged
            index = args[0] % len(pair.texts)
            alone = Pair(kind, [pair.texts[index].copy()], pair.cache.row(index))
            alone.check_counts()
            alone.counter = pair.counter + 99
            alone.trim(args[1])
            for _ in range(args[1]):
                alone.add(2)
        elif move == "state":
            mx.eval(pair.cache.state)
            assert pair.cache.nbytes >= sum(x.nbytes for x in pair.cache.state)


@pytest.mark.parametrize("kind", ["rotating", "rotating, quantized", "windowed", "windowed, quantized"])
def test_memory_of_a_bounded_cache_is_constant(kind):
    cache = KVCache(**KINDS[kind])
    policy = cache.rotation or cache.window
    bound = policy.num_retained + policy.extra_capacity
    token = mx.ones((1, H, 1, D))
    held = set()
    for n in range(600):
        cache.update_and_fetch(token, token)
        mx.eval(cache.state)
        if n > 2 * bound:
            held.add(cache.nbytes)
    assert cache.offset == 600
    assert max(held) <= 2 * 4 * H * D * (bound + 4) and max(held) < 1.3 * min(held)


def test_is_trimmable_until_tokens_are_dropped():
    cache = KVCache(rotation=RotationPolicy(20, 2))
    x = mx.ones((1, H, 20, D))
    cache.update_and_fetch(x, x)
    assert cache.size() == 20 and cache.is_trimmable() and cache.can_trim(20)
    cache.update_and_fetch(x[:, :, :1], x[:, :, :1])
    assert cache.size() == 20 - cache.rotation.step + 1
    assert cache.can_trim(1) and not cache.can_trim(2)


def test_an_update_larger_than_the_room_is_an_error():
    cache = KVCache(rotation=RotationPolicy(20, 2))
    x = mx.ones((1, H, 21, D))
    with pytest.raises(GenerationError, match="21 tokens at once, .* 0 of 20 tokens has room for 20"):
        cache.update_and_fetch(x, x)
    cache.update_and_fetch(x[:, :, :15], x[:, :, :15])
    with pytest.raises(GenerationError, match="has room for 5"):
        cache.update_and_fetch(x[:, :, :6], x[:, :, :6])
    assert cache.offset == 15 and cache.max_update_size == 5


@pytest.mark.skipif(not ON_CPU, reason="addresses of arrays are seen on a CPU")
@pytest.mark.parametrize("kind", ["full", "quantized", "rotating without sinks", "windowed, quantized"])
def test_a_decoded_token_writes_in_place(kind):
    cache = KVCache(**KINDS[kind])
    token = mx.ones((1, H, 1, D))

    def addresses():
        return [np.array(x, copy=False).__array_interface__["data"][0] for x in cache._buffers[0].arrays]

    moved, before = -1, None
    for _ in range(200):
        keys, values = cache.update_and_fetch(token, token)
        held = keys.arrays if isinstance(keys, QuantizedKV) else [keys]
        mx.async_eval([x + 1 for x in held])  # attention reads them while the next token is on its way
        mx.eval(cache.state)
        now = addresses()
        moved += now != before
        before = now
    assert moved <= 200 / min(cache.rotation.step if cache.rotation else 64, 64) + 1


def test_a_row_has_no_padding_and_keeps_its_factors():
    cache = KVCache(key_bits=8)
    assert cache.row(0).offset == 0 and not cache.row(0).state
    cache.long_factors = True
    cache.set_left_padding([0, 3])
    x = mx.ones((2, H, 4, D))
    cache.update_and_fetch(x, x)
    row = cache.row(1)
    assert row.offsets == [1] and row.long_factors
    assert [part.shape[:3] for part in row.state] == [(1, H, 1)] * 4  # nothing of the padding is held


def test_a_head_dim_that_cannot_be_quantized():
    cache = KVCache(key_bits=8)
    with pytest.raises(GenerationError, match="head dim 24 can't be quantized.*multiple of 32.*no `key_bits`"):
        cache.update_and_fetch(mx.ones((1, 1, 1, 24)), mx.ones((1, 1, 1, 24)))


def test_the_group_size_is_64_or_32():
    for dim, group in ((128, 64), (96, 32), (32, 32)):
        cache = KVCache(key_bits=8)
        keys, _ = cache.update_and_fetch(mx.ones((1, 1, 1, dim)), mx.ones((1, 1, 1, dim)))
        assert keys.group_size == group and keys.shape == (1, 1, 1, dim)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, KVOptions()),
        ({"size": 100}, KVOptions(100, 4)),
        ({"size": 100, "keep": 0, "bits": 8}, KVOptions(100, 0, 8, 8)),
        ({"bits": (8, 4)}, KVOptions(None, 4, 8, 4)),
        ({"bits": "8, 4"}, KVOptions(None, 4, 8, 4)),
        ({"bits": "4"}, KVOptions(None, 4, 4, 4)),
        ({"bits": "none,4"}, KVOptions(None, 4, None, 4)),
        ({"bits": "none"}, KVOptions()),
        ({"bits": (None, 8)}, KVOptions(None, 4, None, 8)),
    ],
)
def test_options_from_user_input(arguments, expected):
    assert KVOptions.of(**arguments) == expected


def test_errors_name_every_invalid_option():
    with pytest.raises(GenerationError) as error:
        KVOptions(keep=-1, key_bits=3, value_bits=True)
    assert all(part in str(error.value) for part in ("keep is -1", "key_bits is 3", "value_bits is True"))
    with pytest.raises(GenerationError, match="size is 3, it must be at least 6"):
        KVOptions(size=3, keep=4)
    for bits in ("8,4,4", "", "8,", "eight", "9" * 5000, 7, (), (8, 4, 4), 8.5):
        with pytest.raises(GenerationError):
            KVOptions.of(bits=bits)


CASES = pytest.mark.parametrize("quantization", [None, (8, 64), (4, 32)])
DIMS = pytest.mark.parametrize("D", [64, 128])


def buffer_and_token(D, quantization):
    keys = mx.random.normal((2, 3, 9, D), key=mx.random.key(0)).astype(mx.bfloat16)
    buffer = KVBuffer.like(keys, quantization)
    buffer = KVBuffer([mx.array(part) for part in buffer.quantize(keys)], quantization)
    mx.eval(buffer.arrays)
    return buffer, keys[:, :, :1] + 1


@DIMS
@CASES
def test_a_position_given_as_an_array(D, quantization):
    buffer, token = buffer_and_token(D, quantization)
    write = mx.compile(lambda index, token, *arrays: KVBuffer(arrays, quantization).with_position(index, token).arrays)
    written = write(mx.array([4], mx.int32), token, *buffer.arrays)
    buffer.write(4, 5, token)
    assert all(mx.array_equal(x, y).item() for x, y in zip(written, buffer.arrays, strict=True))


@pytest.mark.skipif(ON_CPU, reason="a CPU writes faster with slice_update")
@CASES
def test_writing_a_position_takes_one_kernel_per_array(quantization):
    buffer, token = buffer_and_token(128, quantization)
    mx.eval(token)
    written = buffer.with_position(mx.array([4], mx.int32), token).arrays
    names = operations(written)
    assert names.count("ScatterAxis") == len(buffer.arrays) and "DynamicSliceUpdate" not in names


@pytest.mark.skipif(ON_CPU, reason="a CPU writes faster with slice_update")
def test_rows_that_begin_with_half_a_pair_are_not_scattered():
    """With head dim 64 in groups of 64, a row of scales has one element of 16 bits; ScatterAxis stores pairs."""
    buffer, token = buffer_and_token(64, (8, 64))
    packed, scales, biases = buffer.with_position(mx.array([4], mx.int32), token).arrays
    assert "ScatterAxis" in operations([packed])
    for part in (scales, biases):
        assert "DynamicSliceUpdate" in operations([part]) and "ScatterAxis" not in operations([part])
