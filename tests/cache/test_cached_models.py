"""Models on every kind of cache: against the whole text at once, against a naive recomputation, row by row."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVCache, KVOptions, make_cache
from mlxlm.cache.policies import SlidingWindow
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "head_dim": 8,
    "max_position_embeddings": 400,
}


def make(layers=2, seed=0, **changes):
    model = Decoder(ModelConfig(**{**SIZES, "num_hidden_layers": layers, **changes}))
    model.init_weights(seed)
    # Larger keys and queries than fresh ones: who is seen must matter.
    for layer in model.layers:
        for projection in (layer.self_attn[name] for name in ("q_proj", "k_proj") if name in layer.self_attn):
            projection.weight = projection.weight * 4
    model.eval()
    return model


def tokens_of(n, seed=0, rows=1):
    return mx.array(np.random.default_rng(seed).integers(0, 97, (rows, n)))


def in_pieces(model, caches, tokens, ends):
    parts = [model(tokens[:, a:b], caches) for a, b in itertools.pairwise([0, *ends])]
    return mx.concatenate(parts, axis=1)


def as_room_allows(model, caches, tokens, pieces):
    """Logits of a text read in `pieces`, cut where a cache drops tokens."""
    parts, done, pieces = [], 0, itertools.cycle(pieces)
    while done < tokens.shape[1]:
        max_update_size = min((c.max_update_size for c in caches if c.max_update_size is not None), default=1 << 30)
        n = min(next(pieces), max_update_size, tokens.shape[1] - done)
        parts.append(model(tokens[:, done : done + n], caches))
        done += n
    return mx.concatenate(parts, axis=1)


def close(found, wanted, atol=5e-5):
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=atol, rtol=0)


WINDOWED = {
    "mistral": {"sliding_window": 9},
    "gemma 2": {
        "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention"),
        "norm_placement": "both", "attn_logit_softcapping": 2.0, "norm_unit_offset": True,
    },
    "alibi": {"sliding_window": 9, "positions": "alibi", "norm": "layer"},
    "gemma 4": {
        "layers": 4, "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention") * 2,
        "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "value_norm": True,
        "num_kv_shared_layers": 2, "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


@lru_cache
def windowed_models(kind):
    return make(**WINDOWED[kind])


@pytest.mark.parametrize("kind", WINDOWED)
@settings(max_examples=3)
@given(pieces=st.lists(st.integers(5, 70), min_size=3, max_size=5), trims=st.lists(st.integers(1, 64), max_size=2))
@example(pieces=[1], trims=[64])
def test_window_caches_give_the_logits_of_the_whole_text(kind, pieces, trims):
    model, tokens = windowed_models(kind), tokens_of(210)
    whole, caches = np.array(model(tokens)), make_cache(model)
    close(as_room_allows(model, caches, tokens, pieces), whole)
    for trim in trims:  # up to the slack
        for cache in caches:
            assert cache.trim(trim) == trim
        at = 210 - trim
        close(as_room_allows(model, caches, tokens[:, at:210], pieces), whole[:, at:210])
    windowed = [c for c in caches if c.window]
    assert windowed and all(c.nbytes < 2 * 4 * 2 * 8 * (9 + 64 + 64 + 128) for c in windowed)
    assert not windowed[0].can_trim(209)


@pytest.mark.parametrize("window, slack", [(9, 64), (512, 128), (4096, 1024), (100_000, 1024)])
def test_slack_of_a_window(window, slack):
    assert SlidingWindow.of(window).num_retained == window - 1 + slack


# Rotation: a text computed again naively, by exactly what the rule lets each token see.


def naive(model, tokens, size, keep, turn):
    """Logits of a text, token by token, on lists of keys without positions; `turn(x, first)` gives them theirs."""
    step = max(1, (size - keep) // 8)
    layers = [([], []) for _ in model.layers]
    out = []
    for token in tokens[0].tolist():
        stream = model.model.embed(mx.array([[token]]))
        for block, (keys, values) in zip(model.layers, layers, strict=True):
            if len(keys) == size:
                del keys[keep : keep + step], values[keep : keep + step]
            x, a = block.input_layernorm(stream), block.self_attn

            def heads(y):
                return y.reshape(1, 1, -1, 8).swapaxes(1, 2)

            keys.append(heads(a.k_proj(x)))
            values.append(heads(a.v_proj(x)))
            q = turn(heads(a.q_proj(x)), len(keys) - 1)
            k, v = turn(mx.concatenate(keys, axis=2), 0), mx.concatenate(values, axis=2)
            k, v = (mx.repeat(y, 3, axis=1) for y in (k, v))
            scores = (q @ k.swapaxes(-1, -2)) * a.scale
            if a._slopes is not None:
                scores = scores + a._slopes[:, None, None] * (mx.arange(len(keys)) - len(keys) + 1)
            update = a.o_proj((mx.softmax(scores, axis=-1) @ v).swapaxes(1, 2).reshape(1, 1, -1))
            stream = stream + update
            stream = stream + block.mlp(block.post_attention_layernorm(stream))
        out.append(model.head(model.model.norm(stream)))
    return mx.concatenate(out, axis=1)


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
ROTATING = {
    "rope": {},
    "half of a head": {"partial_rotary_factor": 0.5},
    "llama 3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
    "longrope, short": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 30}},
    "longrope, long": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 10}},
    "alibi": {"positions": "alibi"},
    "none": {"positions": "none"},
}


@pytest.mark.parametrize("kind", ROTATING)
@pytest.mark.parametrize("size, keep", [(20, 4), (11, 1)])
def test_rotation_equals_a_naive_recomputation(kind, size, keep):
    model, tokens = make(**ROTATING[kind]), tokens_of(36)
    rope = model.layers[0].self_attn.rope

    def turn(x, position):
        if rope is None:
            return x
        wavelengths = rope.wavelengths
        if kind.startswith("longrope") and size > rope.longrope_threshold:
            wavelengths = rope.long_wavelengths
        base = rope.base if wavelengths is None else None
        turned = mx.fast.rope(x, rope.dims, traditional=False, base=base, scale=1.0, offset=position, freqs=wavelengths)
        # The factor of "longrope" is on queries and keys: half of its square on each.
        return turned if rope.query_scale is None else turned * mx.sqrt(rope.query_scale)

    wanted = naive(model, tokens, size, keep, turn)
    for pieces in ([1], [7, 2]):
        caches = make_cache(model, KVOptions(size, keep))
        for cache in caches:
            cache.long_factors = kind == "longrope, long"
        close(as_room_allows(model, caches, tokens, pieces), wanted, 1e-4)
        assert all(cache.size() <= size for cache in caches)
    assert np.abs(np.array(wanted - model(tokens))[:, size + 5 :]).max() > 1e-2


def test_positions_of_kept_tokens_stay_exact_in_a_long_text():
    model = make(1)
    rope, size, keep = model.layers[0].self_attn.rope, 24, 4
    cache = make_cache(model, KVOptions(size, keep))[0]
    plain = mx.random.normal((1, 2, keep, 8), key=mx.random.key(0))
    token = mx.ones((1, 2, 1, 8))
    for i in range(keep):
        key = plain[:, :, i : i + 1]
        cache.update_and_fetch(rope(key, key, cache.offset, cache)[1], key)
    for _ in range(1000):
        keys, _ = cache.update_and_fetch(token, token)
        mx.eval(keys)
    dropped = cache.offset - cache.size()
    assert dropped > 900
    wanted = mx.fast.rope(plain, 8, traditional=False, base=rope.base, scale=1.0, offset=dropped)
    close(keys[:, :, :keep], wanted, 1e-3)


@pytest.mark.parametrize("bits", [(8, 8), (None, 4), (8, 4)])
def test_rotating_and_quantized_is_near_to_rotating(bits):
    model, tokens = make(head_dim=32), tokens_of(80)
    plain = as_room_allows(model, make_cache(model, KVOptions(24, 4)), tokens, [9])
    caches = make_cache(model, KVOptions(24, 4, *bits))
    found = as_room_allows(model, caches, tokens, [9])
    one_by_one = as_room_allows(model, make_cache(model, KVOptions(24, 4, *bits)), tokens, [1])
    close(one_by_one, found, 0.02)  # a rounding of float32 can change a code
    assert 0 < np.abs(np.array(found - plain)).mean() < {8: 0.02, 4: 0.1}[min(b for b in bits if b)]
    assert all(cache.size() <= 24 for cache in caches)


def test_a_quantized_cache_equals_rounded_keys_and_values():
    """As if keys and values had been rounded before they came."""

    class Rounded(KVCache):
        def update_and_fetch(self, keys, values):
            form = {"group_size": 32, "bits": 4}
            return super().update_and_fetch(*(mx.dequantize(*mx.quantize(x, **form), **form) for x in (keys, values)))

    model, tokens = make(head_dim=32, attn_logit_softcapping=3.0), tokens_of(50)
    for ends in ([50], list(range(1, 51)), [20, 21, 30, 50]):
        found = in_pieces(model, make_cache(model, KVOptions.of(bits=4)), tokens, ends)
        close(found, in_pieces(model, [Rounded() for _ in model.layers], tokens, ends))


ROWS = {
    "rope": {},
    "learned": {"positions": "learned", "position_offset": 2, "norm": "layer"},
    "alibi": {"positions": "alibi"},
    "gemma 2": WINDOWED["gemma 2"],
    "gemma 4": WINDOWED["gemma 4"],
}


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions(size=30), KVOptions.of(bits="8,4")], ids=str)
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_different_lengths_equal_each_alone(kind, kv):
    model = make(head_dim=32, **ROWS[kind])
    atol = 5e-5 if kv.key_bits is None else 0.05  # a rounding of float32 can change a code
    lengths, more = [3, 28, 17, 1], 20
    texts = [tokens_of(n + more, seed) for seed, n in enumerate(lengths)]
    alone = [as_room_allows(model, make_cache(model, kv), text, [11]) for text in texts]
    # Read together with padding.
    longest = max(lengths)
    pads = [longest - n for n in lengths]
    caches = make_cache(model, kv)
    for cache in caches:
        cache.set_left_padding(pads)
    padded = mx.concatenate(
        [mx.pad(text[:, :n], [(0, 0), (pad, 0)]) for text, n, pad in zip(texts, lengths, pads, strict=True)]
    )
    logits = model(padded, caches)
    assert mx.isfinite(logits).all()
    for row, (n, pad) in enumerate(zip(lengths, pads, strict=True)):
        close(logits[row, pad:], alone[row][0, :n], atol)
    # Read separately and merged.
    single = []
    for text, n in zip(texts, lengths, strict=True):
        own = make_cache(model, kv)
        as_room_allows(model, own, text[:, :n], [11])
        single.append(own)
    merged = [KVCache.merge(rows) for rows in zip(*single, strict=True)]
    rows = [0, 1, 2, 3]
    for step in range(more):
        token = mx.concatenate([texts[row][:, lengths[row] + step][None] for row in rows])
        for several in (caches, merged):
            logits = model(token, several)
            for i, row in enumerate(rows):
                close(logits[i, 0], alone[row][0, lengths[row] + step], atol)
        if step == 10:  # a text ends, and the others change places
            rows = [2, 0, 1]
            for cache in (*caches, *merged):
                cache.select([2, 0, 1])
    for cache in caches:
        assert cache.offsets == [lengths[row] + more for row in rows]


def test_a_long_padded_prompt():
    """From 1,024 tokens on, another path computes attention."""
    model = make(1, max_position_embeddings=1200)
    long, short = tokens_of(1100, 0), tokens_of(30, 1)
    caches = make_cache(model)
    caches[0].set_left_padding([0, 1070])
    logits = model(mx.concatenate([long, mx.pad(short, [(0, 0), (1070, 0)])]), caches)
    assert mx.isfinite(logits).all()
    close(logits[0], model(long)[0])
    close(logits[1, 1070:], model(short)[0])


def test_positions_that_depend_on_the_length_cannot_be_batched():
    dynamic = make(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=20)
    longrope = make(rope_scaling={**LONGROPE, "original_max_position_embeddings": 16})
    assert make().supports_batching and not dynamic.supports_batching and not longrope.supports_batching
    for model in (dynamic, longrope):
        caches = make_cache(model)
        for cache in caches:
            cache.set_left_padding([0, 2])
        with pytest.raises(GenerationError, match="different lengths can't be batched"):
            model(tokens_of(5, rows=2), caches)


def test_cache_options_that_a_model_does_not_support():
    dynamic = make(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(GenerationError, match='"dynamic" can.t keep the first tokens.*keep'):
        make_cache(dynamic, KVOptions(size=20))
    make_cache(dynamic, KVOptions(size=20, keep=0))
    with pytest.raises(GenerationError, match="head dim 8 can't be quantized"):
        make_cache(make(), KVOptions.of(bits=8))

    class Foreign:
        def make_cache(self):
            return ["its own"]

    assert make_cache(Foreign()) == ["its own"]
    for kv in (KVOptions(size=100), KVOptions.of(bits=8)):
        with pytest.raises(GenerationError, match="its own cache type"):
            make_cache(Foreign(), kv)


def test_the_smaller_of_window_and_size_decides():
    model = make(sliding_window=16, layer_types=("sliding_attention", "full_attention"))
    kinds = [(c.window is not None, c.rotation is not None) for c in make_cache(model, KVOptions(size=40))]
    assert kinds == [(True, False), (False, True)]
    assert all(c.rotation is not None and c.window is None for c in make_cache(model, KVOptions(size=16)))
