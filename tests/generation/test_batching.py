"""Batched generation: every text equals that of its request alone."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm import batch, generate
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.cache import KVOptions
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation import Engine, GenerationOptions, Request, device_thread
from mlxlm.generation import run_batch as run_engine
from mlxlm.generation.engine import ordered_results
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError, MlxlmError
from tests.generation.recording_model import recording
from tests.generation.texts import SYSTEM, alone, greedy, same


def run_batch(lm, requests, *, kv=None, batch_size=32, **arguments):
    return run_engine(Engine(lm, kv=kv, batch_size=batch_size), requests, **arguments)


def test_a_model_without_batching_runs_sequentially(lm):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = lm.config.with_changes(rope_scaling=scaling)
    model = Decoder(config)
    model.load_weights(tree_flatten(lm.model.parameters()))
    dynamic = replace(lm, model=model, config=config)
    assert lm.supports_batching and not dynamic.supports_batching
    wanted = [greedy([*SYSTEM, 7 + i]) for i in range(4)]
    found = list(run_batch(dynamic, wanted, batch_size=4))
    assert [index for index, _ in found] == [0, 1, 2, 3]
    assert [result.cached_tokens for _, result in found] == [0, 40, 40, 40]
    for index, result in found:
        same(result, alone(dynamic, wanted[index]))


class Counting:
    """A model that notes the shape of each call."""

    def __init__(self, model):
        self._model, self.layers, self.config, self.supports_batching, self.calls = (
            model,
            model.layers,
            model.config,
            True,
            [],
        )

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape)
        return self._model(ids, cache=cache)


def counting(lm):
    return replace(lm, model=Counting(lm.model))


def test_a_shared_prefix_is_read_once(lm):
    model = counting(lm)
    wanted = [greedy([*SYSTEM, 7 + i, *range(i % 3)]) for i in range(8)]
    results = dict(run_batch(model, wanted, batch_size=8))
    read = sum(rows * columns for rows, columns in model.model.calls if columns > 1)
    assert model.model.calls[0] == (1, len(SYSTEM)) and read <= len(SYSTEM) + 8 * 3
    assert all(result.cached_tokens >= len(SYSTEM) - 2 for result in results.values())


def test_the_shared_prefix_outlives_a_batch(lm):
    model = counting(lm)
    for _ in run_batch(model, [greedy([*SYSTEM, 7 + i, 3]) for i in range(12)], batch_size=4):
        pass
    assert sum(columns >= len(SYSTEM) for _, columns in model.model.calls) == 1


def test_samples_of_one_prompt_read_it_once(lm):
    model = counting(lm)
    results = batch(model, [SYSTEM], num_samples=5, temperature=1.0, seed=8, max_tokens=6)
    assert sum(rows * columns for rows, columns in model.model.calls if columns > 1) == len(SYSTEM) - 1
    assert len({result.seed for result in results}) == 5
    assert len({tuple(result.tokens) for result in results}) > 1
    for result in results:
        assert generate(lm, SYSTEM, temperature=1.0, seed=result.seed, max_tokens=6).tokens == result.tokens


def test_a_waiting_request_replaces_a_finished_row(lm):
    model = counting(lm)
    wanted = [greedy([5, 6, 7], 40), *(greedy([5, 6, 8 + i], 3) for i in range(12))]
    order = [index for index, _ in run_batch(model, wanted, batch_size=4)]
    assert order[-1] == 0 and sorted(order) == list(range(13))
    steps = [rows for rows, columns in model.model.calls if columns == 1]
    assert max(steps) == 4 and len(steps) < 60


def test_bad_requests_are_results(lm):
    wanted = [greedy([1] * 128), greedy([5, 6]), greedy([]), greedy([10**12]), greedy([5, 6, 7]), greedy([1.5])]
    for batch_size in (1, 2):
        found = dict(run_batch(lm, wanted, batch_size=batch_size))
        assert [isinstance(found[i], MlxlmError) for i in range(6)] == [True, False, True, True, False, True]
        same(found[4], alone(lm, wanted[4]))


def test_nothing_is_computed_for_a_list_with_a_bad_prompt(lm):
    model = counting(lm)
    with pytest.raises(GenerationError, match="prompt 3: the prompt is too long: 128 tokens"):
        batch(model, ["one", "two", [1] * 128])
    assert model.model.calls == []


def test_a_new_request_starts_while_others_run(lm):
    """Also if one of eight rows is free. A bad request has its result at once."""
    model, came = recording(lm), []
    pause = model.model.pause_at(20)
    options = GenerationOptions(temperature=0, max_tokens=60)

    def source():
        yield from (Request([5, 6, 7 + i], options, frozenset()) for i in range(7))
        yield None
        pause.reach()
        yield from (greedy([5, 6], 2), greedy([]))
        pause.resume()
        while len(came) < 2:
            yield None

    for index, _ in run_batch(model, source(), batch_size=8):
        came.append(index)
    assert came[:2] == [8, 7]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_requests_are_taken_lazily(lm, batch_size):
    drawn = []

    def source():
        for i in itertools.count():
            drawn.append(i)
            yield greedy([5, 6, i % 250], 2)

    run = run_batch(lm, source(), batch_size=batch_size)
    first = [next(run) for _ in range(3)]
    run.close()
    assert len(first) == 3 and len(drawn) <= 5 * batch_size + 3


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_iterable_may_yield_none_for_now(lm, batch_size):
    received = []

    def source():
        yield greedy([5, 6, 7], 3)
        while not received:  # waits for the first answer
            yield None
        yield greedy([5, 6, 8], 3)

    for index, result in run_batch(lm, source(), batch_size=batch_size):
        received.append(index)
        assert len(result.tokens) == 3
    assert received == [0, 1]


def test_results_in_the_order_of_their_requests():
    drawn = []
    source = ((drawn.append(n), (n, f"result {n}"))[1] for n in (0, 3, 1, 2))
    ordered = ordered_results(source)
    assert next(ordered) == "result 0" and drawn == [0]  # as soon as it can
    assert list(ordered) == ["result 1", "result 2", "result 3"]
    with pytest.raises(GenerationError, match="no"):
        next(ordered_results([(1, GenerationError("no"))]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_progress(lm, batch_size):
    progress = []
    wanted = [greedy([5, 6, 7, 8 + i], 4) for i in range(5)] + [greedy([])]
    results = dict(run_batch(lm, wanted, batch_size=batch_size, on_progress=progress.append))
    assert progress == sorted(progress) and progress[-1] == sum(len(results[i].tokens) for i in range(5))
    # All begin with the same three tokens, which are read once.
    read = sum(len(wanted[i].prompt) - 1 - results[i].cached_tokens for i in range(5))
    assert read == 3


def test_rows_end_where_the_context_does(lm):
    wanted = [Request([1 + i] * (120 - i), GenerationOptions(temperature=0, max_tokens=None, seed=1)) for i in range(4)]
    for index, result in run_batch(lm, wanted, batch_size=4):
        assert result.finish_reason == "context" and len(result.tokens) == 8 + index
        same(result, alone(lm, wanted[index]))


@pytest.mark.parametrize("changes", [{"positions": "learned"}, {"positions": "alibi"}], ids=str)
def test_finished_rows_are_removed_at_the_end_of_the_context(lm, changes):
    """It computes on until it is taken out, and a learned table has no more."""
    config = lm.config.with_changes(max_position_embeddings=32, **changes)
    model = Decoder(config)
    model.init_weights(2)
    other = replace(lm, model=model, config=config)
    options = GenerationOptions(temperature=0, max_tokens=100, seed=1)
    wanted = [Request([1 + n] * n, options, frozenset()) for n in (30, 20, 3, 1)]
    for index, result in run_batch(other, wanted, batch_size=4):
        assert result.finish_reason == "context"
        same(result, alone(other, wanted[index]))


def test_an_idle_engine_holds_no_caches(lm):
    engine = Engine(lm, prefix_cache_bytes=0)
    stream = engine.submit(greedy([5, 6, 7], 100))
    next(stream)
    assert engine.stats.kv_bytes > 0 and engine.stats.running == 1
    stream.result()
    device_thread.run(lambda: None)  # after the step that ended the text
    assert engine.stats.kv_bytes == 0 and engine.stats.running == 0


def test_nan_logits_fail_one_row_only(lm):
    class Broken(Counting):
        def __call__(self, ids, cache=None):
            return mx.where(ids[..., None] == 250, mx.nan, super().__call__(ids, cache))

    broken = replace(lm, model=Broken(lm.model))
    wanted = [greedy([5, 6, 7], 9), greedy([5, 6, 250], 9), greedy([5, 6, 8], 9)]
    for batch_size in (1, 3):
        found = dict(run_batch(broken, wanted, batch_size=batch_size))
        assert isinstance(found[1], GenerationError) and "not numbers" in str(found[1])
        for index in (0, 2):
            same(found[index], alone(lm, wanted[index]))


def test_after_a_failed_step_the_next_texts_are_generated(lm):
    class Failing(Counting):
        def __call__(self, ids, cache=None):
            if len(self.calls) == 5:
                self.calls.append("failed")
                raise RuntimeError("out of memory")
            return super().__call__(ids, cache)

    engine = Engine(replace(lm, model=Failing(lm.model)))
    wanted = [greedy([5, 6, 7 + i], 9) for i in range(3)]
    with pytest.raises(RuntimeError, match="out of memory"):
        list(run_engine(engine, wanted))
    for index, result in run_engine(engine, wanted):
        same(result, alone(lm, wanted[index]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"prompts": "one"}, "not a list of texts"),
        ({"prompts": [3, 4]}, "prompt 1: the prompt is neither a text nor a list of ids"),
        ({"prompts": ["one", []]}, "prompt 2: the prompt is empty"),
        ({"prompts": ["one", [10**12]]}, "prompt 2: the prompt has ids that this model doesn't have"),
        ({"logit_bias": {300: 1}}, "prompt 1: logit_bias names the token 300"),
        ({"kv": "8"}, "kv is '8' .*KVOptions.of"),
        (
            {"kv_bits": 8},
            "no option kv_bits .*try: logit_bias or kv or",
        ),
        ({"temperature": -1}, "temperature is -1"),
        ({"kv": KVOptions(size=129)}, "more than the model's context"),
    ],
)
def test_refused(lm, arguments, message):
    with pytest.raises(GenerationError, match=message):
        batch(lm, **{"prompts": ["one"], **arguments})


@given(st.lists(st.integers(0, 1), max_size=600), st.lists(st.integers(0, 1), max_size=600), st.integers(0, 600))
def test_common_prefix_length(one, other, n):
    one, other = [7] * n + one, [7] * n + other
    pairs = zip(one, other, strict=False)
    assert common_prefix_length(one, other) == len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
