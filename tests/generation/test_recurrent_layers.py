"""Recurrent layers of the decoder in the engine: batches of different lengths, prefixes, memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, make_cache, open_prompt_cache, save_prompt_cache
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.generation import Context, Engine, prefill, run_batch
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.drafters import DraftModel
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.utils.errors import CheckpointError
from tests.generation.fake_drafters import Oracle, always, perturbed
from tests.generation.recording_model import RecordingModel
from tests.generation.test_batching import requests
from tests.generation.texts import alone, request, same

KINDS = {
    "short convolutions": {"layer_types": ("conv", "full_attention", "conv"), "conv_L_cache": 4},
    "gated delta rule": {
        "layer_types": ("linear_attention", "full_attention", "linear_attention"), "attn_output_gate": True,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    },
    "Mamba 2": {
        "layer_types": ("mamba", "full_attention", "mamba"), "positions": "none",
        "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_d_state": 12,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(lm):
    def build(changes):
        model = RecordingModel(
            lm.config.with_changes(num_hidden_layers=3, head_dim=32, max_position_embeddings=600, **changes)
        )
        model.init_weights(seed=3)
        model.lm_head.weight = model.lm_head.weight * 20
        model.eval()
        return replace(lm, model=model, config=model.config)

    return {name: build(changes) for name, changes in KINDS.items()}


@settings(max_examples=2)
@given(st.sampled_from(list(KINDS)), st.lists(requests, min_size=2, max_size=4), st.sampled_from([None, "8"]))
def test_a_text_is_the_one_that_its_request_gives_alone(models, kind, wanted, bits):
    lm, kv = models[kind], KVOptions.of(bits=bits)
    for index, result in run_batch(Engine(lm, kv=kv, batch_size=3), wanted):
        same(result, alone(lm, wanted[index], kv))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_are_read_together(models, kind):
    lm = models[kind]
    lm.model.calls.clear()
    wanted = [request([*range(5, 9 + 3 * i)], 3, temperature=0) for i in range(4)]
    found = dict(run_batch(Engine(lm), wanted))
    assert any(rows > 1 and columns > 1 for rows, columns in lm.model.calls)
    for index, result in found.items():
        same(result, alone(lm, wanted[index]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reads_no_more_than_an_interval_again(models, kind, monkeypatch):
    monkeypatch.setattr(prefill, "SNAPSHOT_INTERVAL", 32)
    lm, first = models[kind], [*range(1, 100)]
    engine = Engine(lm)
    answer = engine.submit(request(first)).result()
    follow_up = request([*first, *answer.tokens, *range(40, 60)])
    result = engine.submit(follow_up).result()
    assert result.cached_tokens >= len(first) - 1
    same(result, alone(lm, follow_up))
    other = request([*first[:90], 299, 2, 3])
    result = engine.submit(other).result()
    assert 90 - 32 <= result.cached_tokens <= 90
    same(result, alone(lm, other))


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=128), KVOptions.of(bits="8,4")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_what_caches_take(models, kind, kv):
    context = Context(models[kind].model, kv)
    context.read([7] * 510, 16)
    context.read([7]), context.read([7])
    nbytes = sum(cache.nbytes for cache in context.caches)
    assert KVMemory(models[kind], kv, 0).bytes_for(512) == pytest.approx(nbytes, rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go(models, kind):
    """Rows that finished are replaced; tokens that were read in vain are taken back."""
    model = models[kind].model
    step = DecodeStep(model)

    def read(*texts):
        caches = [make_cache(model) for _ in texts]
        for text, own in zip(texts, caches, strict=True):
            model(mx.array([text]), own)
        return [type(layer[0]).merge(layer) for layer in zip(*caches, strict=True)]

    def logits(*text):
        return model(mx.array([text]))[0, -1]

    caches, new = read([1, 2, 3, 4], [5, 6, 7, 8]), read([9, 10])
    step(mx.array([[11], [12]]), caches)
    assert all(mine.can_replace_rows(theirs) for mine, theirs in zip(caches, new, strict=True))
    for mine, theirs in zip(caches, new, strict=True):
        mine.replace_rows([1], theirs)
    found = step(mx.array([[13], [14]]), caches)
    assert mx.allclose(found[0], logits(1, 2, 3, 4, 11, 13), atol=1e-3)
    assert mx.allclose(found[1], logits(9, 10, 14), atol=1e-3)
    step(mx.array([[15], [16]]), caches)
    for cache in caches:
        assert cache.can_trim(1)
        cache.trim(1)
    found = step(mx.array([[17], [18]]), caches)
    assert mx.allclose(found[0], logits(1, 2, 3, 4, 11, 13, 17), atol=1e-3)
    assert mx.allclose(found[1], logits(9, 10, 14, 18), atol=1e-3)
    assert sum(isinstance(cache, RecurrentCache) for cache in caches) == 2


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 4, "top_k": 20}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_with_drafts_are_those_without(models, kind, options):
    """Drafts of which none or some tokens are right, and those of a model that has such layers, too."""
    lm, wanted = models[kind], request(max_tokens=16, **options)
    expected = alone(lm, wanted)
    for drafter in (Oracle(expected.tokens, 1), Oracle(expected.tokens, 3), DraftModel(replace(lm, model=near(lm)))):
        speculation = always(drafter, 4)
        engine = Engine(lm, speculation=speculation)
        same(engine.submit(wanted).result(), expected)
        stats, wrong = speculation.stats, getattr(drafter, "wrong", 0)
        assert stats.rounds > 2 and stats.proposed > stats.accepted and (stats.accepted > 3) == (wrong != 1)
    speculation.drafter = Oracle([])
    result = engine.submit(request([*wanted.prompt, *expected.tokens, 9], **options)).result()
    assert result.cached_tokens >= len(wanted.prompt) + len(expected.tokens) - 1


def near(lm):
    return perturbed(lm.model, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_states(models, kind, tmp_path):
    """Of a prompt, and of the prefix cache: what continues them is read from their end, nothing else can be."""
    lm, prompt = models[kind], [i % 300 for i in range(7, 400)]
    with Engine(lm, prefix_cache_dir=tmp_path / "folder") as engine:
        first = engine.submit(request(prompt)).result()
        assert engine.save_prefix(tmp_path / "file", prompt)
    text = [*prompt, *first.tokens]
    for ids, num_cached in (([*text, 8, 9], len(text) - 1), ([*prompt[:300], 8], 0)):
        wanted = request(ids)
        result = Engine(lm, prefix_cache_dir=tmp_path / "folder").submit(wanted).result()
        assert result.cached_tokens >= num_cached and (result.cached_tokens > 0) == (num_cached > 0)
        same(result, alone(lm, wanted))
    engine, wanted = Engine(lm), request([*prompt, 8])
    assert engine.load_prefix(tmp_path / "file") == len(prompt) - 1
    result = engine.submit(wanted).result()
    assert result.cached_tokens == len(prompt) - 1
    same(result, alone(lm, wanted))


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (1, 2, 2), (1, 2)], ids=str)
def test_a_file_with_another_state_is_an_error(shape, tmp_path):
    cache, dtype = RecurrentCache([(2,)]), mx.int32 if shape == (1, 2) else mx.float32
    cache[0] = mx.ones(shape, dtype)
    save_prompt_cache(tmp_path / "file", [cache], [1], {})
    for shapes, problem in ([(2,)], "layer 0: state.0 is"), ([], "layer 0: a state has 0 arrays"):
        with pytest.raises(CheckpointError, match=problem):
            open_prompt_cache(tmp_path / "file").load([RecurrentCache(shapes)])
