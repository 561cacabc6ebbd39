"""Each kind of cache in the engine: texts share batches, are continued from prefixes, and take the expected memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.cache import KVOptions
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation import Context, Engine, GenerationOptions, Request, prefill, run_batch
from mlxlm.generation.kv_memory import KVMemory
from tests.generation.cache_models import DECODERS, KINDS, POSITIONS, WITH_BATCHES
from tests.generation.texts import OPTIONS, SYSTEM, alone, greedy, request, same

prompts = st.one_of(
    st.lists(st.integers(1, 299), min_size=1, max_size=60),
    st.lists(st.integers(1, 299), min_size=1, max_size=12).map(lambda tail: SYSTEM + tail),
)
requests = st.builds(
    lambda ids, which, n: Request(ids, GenerationOptions.of(**{"seed": 1, **OPTIONS[which], "max_tokens": n})),
    prompts, st.integers(0, len(OPTIONS) - 1), st.sampled_from([1, 2, 5, 9, 20]),
)  # fmt: skip


@settings(max_examples=10)
@given(
    st.sampled_from(KINDS),
    st.lists(requests, min_size=2, max_size=5),
    st.sampled_from([KVOptions(), KVOptions.of(bits=8), KVOptions.of(size=20, keep=2)]),
    st.integers(1, 4),
)
def test_a_text_is_the_one_that_its_request_gives_alone(models, kind, wanted, kv, batch_size):
    lm = models[kind]
    for index, result in run_batch(Engine(lm, kv=kv, batch_size=batch_size), wanted):
        same(result, alone(lm, wanted[index], kv))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_share_a_batch(models, kind):
    """Also their prompts, of different lengths, unless the model has recurrent layers of mlx_lm."""
    lm, wanted = models[kind], [greedy([*range(5, 9 + 3 * i)]) for i in range(6)]
    lm.model.calls.clear()
    found = dict(run_batch(Engine(lm), wanted))
    shared = [columns for rows, columns in lm.model.calls if rows == 6]
    assert max(shared) > 1 if kind in [*DECODERS, "sliding windows"] else len(shared) >= 2
    for index, result in found.items():
        same(result, alone(lm, wanted[index]))


@pytest.mark.parametrize("restarts", [False, True], ids=["in memory", "after restarts"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reads_no_more_than_an_interval_again(models, kind, restarts, tmp_path, monkeypatch):
    """Also if the prompt leaves the text at the answer, whose reasoning it drops, or before."""
    monkeypatch.setattr(prefill, "SNAPSHOT_INTERVAL", 32)
    lm, first = models[kind], [i % 300 for i in range(1, 400)]
    engine = Engine(lm, prefix_cache_dir=tmp_path)
    text = [*first, *engine.submit(request(first)).result().tokens]
    for ids, cached in (
        ([*text, 40, 41], len(text) - 1),
        ([*first, *text[-5:], 40, 41], len(first) - 1),
        ([*first[:370], 299, 2, 3], 370 - 32),
        ([*first[:290], 298, 2, 3], 290 - 32),
    ):
        if restarts:
            engine.close()
            engine = Engine(lm, prefix_cache_dir=tmp_path)
        result = engine.submit(request(ids)).result()
        assert cached <= result.cached_tokens <= common_prefix_length(ids, text)
        same(result, alone(lm, request(ids)))


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=128), KVOptions.of(bits="8,4")], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *([POSITIONS] if WITH_BATCHES[0] in KINDS else [])])
def test_the_estimate_is_what_caches_take(models, kind, kv):
    context = Context(models[kind].model, kv)
    context.read([7] * 510, 16)
    context.read([7]), context.read([7])
    nbytes = sum(cache.nbytes for cache in context.caches)
    memory = KVMemory(models[kind], kv, 0)
    assert memory.bytes_for(512) == pytest.approx(nbytes, rel=0.15)
    assert memory.bytes_for(512, 3) == 3 * memory.bytes_for(512)
