"""Cache files: saving, loading, malformed files."""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import (
    KVCache,
    KVOptions,
    fingerprint,
    make_cache,
    open_prompt_cache,
    save_prompt_cache,
)
from mlxlm.cache import prompt_cache_file as cache_file
from mlxlm.cache.policies import RotationPolicy, SlidingWindow
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, GenerationError

IDENTITY = {"model": "m", "kv": "full", "name": "größer"}


def make(seed=0, **changes):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    config = ModelConfig(**{**sizes, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 8, **changes})
    model = Decoder(config)
    model.init_weights(seed)
    return model


def read(model, kv, ids):
    caches, done = make_cache(model, kv), 0
    while done < len(ids):
        n = min([len(ids) - done, 7, *(c.max_update_size for c in caches if c.max_update_size is not None)])
        mx.eval(model(mx.array([ids[done : done + n]]), caches))
        done += n
    return caches


IDS = [int(i) for i in np.random.default_rng(0).integers(0, 50, 240)]


def load(path, caches):
    """Load a file; return its tokens and its identity."""
    file = open_prompt_cache(path)
    file.load(caches)
    return file.ids.tolist(), file.identity


def append(caches, rng, n, dtype):
    """Let every layer read `n` tokens; return what it attends to."""
    seen = []
    for cache in caches:
        keys, values = (mx.array(rng.normal(size=(1, 2, n, 64)), dtype) for _ in range(2))
        seen += [getattr(side, "dequantized", lambda x=side: x)() for side in cache.update_and_fetch(keys, values)]
    return [np.array(x.astype(mx.float32)) for x in seen]


WIDTHS = st.sampled_from([None, 4, 8])
BOUNDS = st.one_of(
    st.just({}),
    st.builds(lambda size, slack: {"window": SlidingWindow(size, slack)}, st.integers(1, 20), st.integers(1, 9)),
    st.builds(lambda size, keep: {"rotation": RotationPolicy(size, keep)}, st.integers(16, 40), st.integers(0, 4)),
)
LAYERS = st.builds(
    lambda bound, keys, values: {**bound, "key_bits": keys, "value_bits": values}, BOUNDS, WIDTHS, WIDTHS
)
IDENTITIES = st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3)


@settings(max_examples=60)
@given(
    layers=st.lists(LAYERS, min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    identity=IDENTITIES,
    trim=st.integers(0, 9),
)
def test_a_loaded_cache_equals_the_saved_one(tmp_path_factory, layers, chunks, dtype, identity, trim):
    """For every kind of layer, and any number of tokens, dropped or not."""
    path, rng = tmp_path_factory.mktemp("round") / "text.cache", np.random.default_rng(0)
    caches, length = [KVCache(**layer) for layer in layers], sum(chunks)
    for chunk in chunks:
        while chunk:
            n = min([chunk, *(c.max_update_size for c in caches if c.max_update_size is not None)])
            append(caches, rng, n, dtype)
            chunk -= n
    if trim < length and all(cache.can_trim(trim) for cache in caches):
        length -= trim
        for cache in caches:
            cache.trim(trim)
    ids = rng.integers(0, 2**31, length).tolist()
    save_prompt_cache(path, caches, ids, identity)
    again = [KVCache(**layer) for layer in layers]
    assert load(path, again) == (ids, identity) and path.stat().st_mode & 0o777 == 0o600
    for old, new in zip(caches, again, strict=True):
        for attribute in ("offset", "max_update_size", "num_trimmable"):
            assert getattr(old, attribute) == getattr(new, attribute)
        assert all(mx.array_equal(x, y) for x, y in zip(old.state, new.state, strict=True))
    for seed in range(5):
        seen = (append(held, np.random.default_rng(seed), 1, dtype) for held in (caches, again))
        assert all(np.array_equal(one, other) for one, other in zip(*seen, strict=True))


def test_files_are_replaced_only_if_allowed(tmp_path):
    model, path = make(), tmp_path / "a.cache"
    caches = read(model, KVOptions(), IDS[:5])
    save_prompt_cache(path, caches, IDS[:5], IDENTITY)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        save_prompt_cache(path, caches, IDS[:5], IDENTITY)
    assert path.read_bytes() == before
    save_prompt_cache(path, caches, IDS[:5], {"model": "other"}, replace=True)
    assert open_prompt_cache(path).identity == {"model": "other"}
    path.write_bytes(b"another file")
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        save_prompt_cache(path, caches, IDS[:5], IDENTITY, replace=True)
    assert path.read_bytes() == b"another file"
    with pytest.raises(CheckpointError, match="without tokens"):
        save_prompt_cache(tmp_path / "b.cache", make_cache(model), [], IDENTITY)
    with pytest.raises(CheckpointError, match="of mlx_lm's own types"):
        save_prompt_cache(tmp_path / "b.cache", [object()], [1], IDENTITY)
    assert [file.name for file in tmp_path.iterdir()] == ["a.cache"]


def test_two_processes_write_one_file(tmp_path, monkeypatch):
    """While one process writes, another one writes the whole file: the last to finish wins."""
    model, path, write = make(), tmp_path / "new" / "a.cache", cache_file.write_tensors
    texts = IDS[:5], IDS[5:30]
    caches = [read(model, KVOptions(), ids) for ids in texts]

    def interrupted(file, *arguments, **settings):
        monkeypatch.setattr(cache_file, "write_tensors", write)
        with monkeypatch.context() as other:
            other.setattr("os.getpid", os.getppid)
            save_prompt_cache(path, caches[1], texts[1], IDENTITY, replace=True)
            assert load(path, make_cache(model))[0] == texts[1]
        write(file, *arguments, **settings)
        assert load(path, make_cache(model))[0] == texts[1]

    for _ in range(2):  # a new file, and an earlier one's place
        monkeypatch.setattr(cache_file, "write_tensors", interrupted)
        save_prompt_cache(path, caches[0], texts[0], IDENTITY, replace=True)
        again = make_cache(model)
        assert load(path, again)[0] == texts[0]
        assert [x.tolist() for c in again for x in c.state] == [x.tolist() for c in caches[0] for x in c.state]
    assert [file.name for file in path.parent.iterdir()] == ["a.cache"]


def test_symbolic_links_and_full_disks(tmp_path, monkeypatch):
    model, real, link = make(), tmp_path / "real.cache", tmp_path / "link.cache"
    caches = read(model, KVOptions(), IDS[:5])
    link.symlink_to(real)
    for identity in ({"model": "one"}, {"model": "other"}):
        save_prompt_cache(link, caches, IDS[:5], identity, replace=True)
        assert link.is_symlink() and open_prompt_cache(real).identity == identity

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_prompt_cache(link, caches, IDS[:5], {"model": "third"}, replace=True)
    assert open_prompt_cache(link).identity == {"model": "other"} and len(list(tmp_path.iterdir())) == 2


KINDS = {
    "full": KVOptions(),
    "rotating": KVOptions(size=16, keep=3),
    "quantized": KVOptions.of(bits="8,4"),
    "rotating, quantized": KVOptions(size=16, key_bits=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_cache_settings_are_an_error(kind, tmp_path):
    model, path = make(sliding_window=None), tmp_path / "a.cache"
    save_prompt_cache(path, read(model, KINDS[kind], IDS[:60]), IDS[:60], IDENTITY)
    for other in KINDS:
        caches = make_cache(model, KINDS[other])
        if other != kind:
            with pytest.raises(CheckpointError, match="layer 0"):
                load(path, caches)
            assert not any(cache.state or cache.offset for cache in caches)
    with pytest.raises(CheckpointError, match="caches of 2 layers, but the model has 3"):
        load(path, make_cache(make(sliding_window=None, num_hidden_layers=3), KINDS[kind]))


def test_a_model_of_other_sizes_is_an_error(tmp_path):
    path = tmp_path / "a.cache"
    save_prompt_cache(path, read(make(), KVOptions(), IDS[:9]), IDS[:9], IDENTITY)
    other = make(num_key_value_heads=2)
    caches = make_cache(other)
    load(path, caches)
    with pytest.raises(GenerationError, match=r"the cache has .* but the model gives .*made with"):
        other(mx.array([[1]]), caches)


def parts(content):
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header, data):
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A model with layers of two kinds, its settings, and a cache file."""
    model, kv = make(layer_types=("full_attention", "sliding_attention")), KVOptions(size=16, keep=2, key_bits=8)
    path = tmp_path_factory.mktemp("caches") / "a.cache"
    save_prompt_cache(path, read(model, kv, IDS[:60]), IDS[:60], IDENTITY)
    return model, kv, path.read_bytes()


def test_malformed_headers(file, tmp_path):
    model, kv, content = file
    path = tmp_path / "bad.cache"

    def refused(change, match):
        header, data = parts(content)
        change(header)
        path.write_bytes(joined(header, data))
        caches = make_cache(model, kv)
        before = mx.get_active_memory()
        with pytest.raises(CheckpointError, match=match):
            load(path, caches)
        assert mx.get_active_memory() - before < 1 << 20 and not any(cache.state for cache in caches)

    def reshape(name, shape, dtype=None):
        def change(header):
            header[name]["shape"] = shape
            header[name]["dtype"] = dtype or header[name]["dtype"]

        return change

    meta = "__metadata__"
    refused(lambda h: h[meta].update(format="mlx"), "not a prompt cache file of mlxlm")
    refused(lambda h: h.pop(meta), "not a prompt cache file")
    refused(lambda h: h[meta].update(identity="[]"), "doesn't say which model it was made with")
    refused(lambda h: h[meta].update(identity='{"a": 1}'), "doesn't say which model it was made with")
    refused(lambda h: h[meta].update(identity="[" * 100_000), "doesn't say which model it was made with")
    refused(lambda h: h[meta].update(dropped="[0]"), "caches of 1 layers")
    refused(lambda h: h[meta].update(dropped="[1e3, 2]"), "no layers")
    refused(lambda h: h[meta].update(dropped="[-1, 2]"), "no layers")
    refused(lambda h: h[meta].update(dropped="[0, 0]"), "layer 0")
    refused(lambda h: h[meta].update(dropped="[46, 9999]"), "layer")
    refused(lambda h: h[meta].update(dropped="[2147483647, 0]"), "layer 0")
    refused(lambda h: h.update(x=h.pop("ids")), "no token IDs")
    refused(lambda h: h.update({"7.keys.0": h.pop("0.keys.0")}), "unexpected tensor 7.keys.0")
    refused(lambda h: h.update({"x": h.pop("0.keys.0")}), "unexpected tensor x")
    for digits in ("9" * 5000, "०"):
        refused(lambda h, d=digits: h.update({f"{d}.keys.0": h.pop("0.keys.0")}), f"unexpected tensor {digits[:9]}")
    refused(lambda h: h.update({"0.more": h.pop("0.keys.1")}), "layer 0: unknown or missing: keys.1, more")
    B, heads, S, W = parts(content)[0]["0.keys.0"]["shape"]
    refused(reshape("0.keys.0", [B, heads, W, S]), "layer 0")
    refused(reshape("0.keys.0", [S, heads, B, W]), "layer 0")
    refused(reshape("0.keys.0", [B, heads, S * W]), "layer 0")
    refused(reshape("0.keys.0", [B, heads, S, W], "I32"), "layer 0")
    refused(reshape("0.keys.0", [B, heads, S, 2**30]), "invalid shape")
    refused(reshape("0.values.0", [B, 2, S, 16]), "layer 0")
    refused(reshape("ids", [60], "F32"), "no token IDs")
    refused(reshape("ids", [4, 15]), "no token IDs")


@settings(max_examples=60)
@given(place=st.floats(0, 1), value=st.integers(0, 255), cut=st.none() | st.floats(0, 1))
def test_a_damaged_file_is_read_or_an_error(file, tmp_path_factory, place, value, cut):
    model, kv, content = file
    damaged = bytearray(content)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    damaged[int(place * (header - 1))] = value
    path = tmp_path_factory.mktemp("damaged") / "a.cache"
    path.write_bytes(bytes(damaged) if cut is None else bytes(damaged)[: int(cut * len(damaged))])
    caches = make_cache(model, kv)
    try:
        ids, _ = load(path, caches)
    except CheckpointError as error:
        assert "\n" not in str(error) and not any(cache.state for cache in caches)
    else:
        assert len(ids) == caches[0].offset == 60
        mx.eval(model(mx.array([[1]]), caches))


def test_the_fingerprint_covers_weights_and_configuration():
    models = make(), make(1), make(rope_theta=5.0), make(rms_norm_eps=0.1)
    found = {fingerprint(model) for model in models}
    assert len(found) == 4 and fingerprint(make()) in found and all(len(f) == 64 for f in found)
    model = make()
    model.layers[1].mlp.up_proj.weight[-1, -1] = 7
    assert fingerprint(model) not in found
    half = make()
    half.apply(lambda x: x.astype(mx.bfloat16))
    assert fingerprint(half) not in found
