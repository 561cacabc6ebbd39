"""Recurrent layers of the decoder in the engine: rows that come and go, speculation, files."""

from dataclasses import replace

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import make_cache, open_prompt_cache, save_prompt_cache
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.generation import Engine
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.drafters import DraftModel
from mlxlm.utils.errors import CheckpointError, GenerationError
from tests.generation.cache_models import RECURRENT
from tests.generation.fake_drafters import Oracle, always, perturbed
from tests.generation.texts import alone, request, same


@pytest.mark.parametrize("kind", RECURRENT)
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
@pytest.mark.parametrize("kind", RECURRENT)
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
    speculation.drafters = [Oracle([])]
    result = engine.submit(request([*wanted.prompt, *expected.tokens, 9], **options)).result()
    assert result.cached_tokens >= len(wanted.prompt) + len(expected.tokens) - 1


def near(lm):
    return perturbed(lm.model, 0.1)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_file_holds_the_states_of_a_prompt(models, kind, tmp_path):
    lm, prompt = models[kind], [i % 300 for i in range(7, 400)]
    engine = Engine(lm)
    engine.submit(request(prompt)).result()
    assert engine.save_prefix(tmp_path / "file", prompt)
    engine, wanted = Engine(lm), request([*prompt, 8])
    assert engine.load_prefix(tmp_path / "file") == len(prompt) - 1
    result = engine.submit(wanted).result()
    assert result.cached_tokens == len(prompt) - 1
    same(result, alone(lm, wanted))


def test_recurrent_states_can_be_taken_back():
    def read(cache, count, value):
        cache.begin_update(cache.rows, count)
        cache[0] = mx.full((cache.rows, 2), value)

    one, other = RecurrentCache([None]), RecurrentCache([None])
    for value, count in enumerate([7, 1, 1], 1):
        read(one, count, value)
    read(other, 5, 9)
    assert one.can_trim(0) and one.can_trim(1) and one.can_trim(2) and not one.can_trim(3)
    both = RecurrentCache.merge([one, other])
    read(both, 1, 4)
    mine, others = both.row(0), both.row(1)
    assert mine.can_trim(2) and not mine.can_trim(3) and not others.can_trim(2) and others.can_trim(6)
    mine.trim(2)
    assert mine[0].tolist() == [[2, 2]] and both[0].tolist() == [[4, 4]] * 2 and not mine.can_trim(1)
    others.trim(1)
    assert others[0].tolist() == [[9, 9]]
    both.select([1])
    assert both.rows == 1 and both.compact_copy().nbytes == 8 < both.nbytes
    one = RecurrentCache([(2,)])
    read(one, 7, 1)
    read(one, 5, 2)
    one.set_after(0, lambda n: mx.full((1, 2), 10 + n))
    for count, left in ((2, 13), (1, 12), (2, 1)):
        one.trim(count)
        assert one[0].tolist() == [[left, left]]
    with pytest.raises(GenerationError, match="can't trim 1 tokens from a recurrent state"):
        one.trim(1)


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (1, 2, 2), (1, 2)], ids=str)
def test_a_file_with_another_state_is_an_error(shape, tmp_path):
    cache, dtype = RecurrentCache([(2,)]), mx.int32 if shape == (1, 2) else mx.float32
    cache[0] = mx.ones(shape, dtype)
    save_prompt_cache(tmp_path / "file", [cache], [1], {})
    for shapes, problem in ([(2,)], "layer 0: state.0 is"), ([], "layer 0: a state has 0 arrays"):
        with pytest.raises(CheckpointError, match=problem):
            open_prompt_cache(tmp_path / "file").load([RecurrentCache(shapes)])
