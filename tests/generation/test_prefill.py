"""Reading prompts: what the prefix cache has isn't read again, and long prompts are read between decoding steps."""

from itertools import pairwise

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.cache import PREFILL_STEP_SIZE, KVOptions
from mlxlm.families import load_preset
from mlxlm.generation import Context, Engine, GenerationOptions, Request, device_memory
from mlxlm.generation.prefill import MIN_CHUNK_TOKENS, _token_cost, chunk_size
from tests.generation.recording_model import recording
from tests.generation.texts import SYSTEM, alone, request, same


def num_read(model):
    """How many tokens were read so far, without those of decoding steps."""
    return sum(rows * columns for rows, columns in model.model.calls if columns > 1)


def test_the_next_turn_reads_only_what_is_new(lm):
    model = recording(lm)
    engine = Engine(model)
    first = engine.submit(request(SYSTEM)).result()
    before = num_read(model)
    assert first.cached_tokens == 0 and before == 39
    second = request([*SYSTEM, *first.tokens, 50, 51, 52])
    found = engine.submit(second).result()
    assert found.cached_tokens >= 40 + 9 and num_read(model) - before <= 3
    same(found, alone(lm, second))


def test_branches_of_a_conversation(lm):
    """Each regenerated or edited turn reads only what differs, whatever came after it."""
    engine = Engine(lm)
    ids = [*SYSTEM, *engine.submit(request(SYSTEM)).result().tokens, 50, 51, 52, 53]
    engine.submit(request(ids)).result()
    for n in (44, 20, 47, 30):
        branch = request([*ids[:n], 60, 61, 62])
        found = engine.submit(branch).result()
        assert found.cached_tokens == n
        same(found, alone(lm, branch))


def test_requests_that_arrive_apart_share_a_system_prompt(lm):
    model = recording(lm)
    engine = Engine(model)
    wanted = [request([*SYSTEM, 7 + i, 8, 9]) for i in range(4)]
    found = [engine.submit(one).result() for one in wanted]
    assert [result.cached_tokens for result in found] == [0, 40, 40, 40]
    assert num_read(model) <= 42 + 3 * 2
    for one, result in zip(wanted, found, strict=True):
        same(result, alone(lm, one))


def test_without_a_prefix_cache_nothing_is_kept(lm):
    engine = Engine(lm, prefix_cache_bytes=0)
    assert [engine.submit(request(SYSTEM)).result().cached_tokens for _ in range(2)] == [0, 0]
    assert engine.stats.prefix_cache_bytes == 0


@pytest.mark.parametrize("kind", ["window", "rotating"])
def test_snapshots_where_a_later_prompt_may_differ(lm, kind):
    """Caches that have dropped tokens can't be trimmed to any length, but return to a snapshot."""
    changes = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]} if kind == "window" else {}
    model, kv = recording(lm, **changes), KVOptions.of(size=20, keep=2) if kind == "rotating" else None
    engine = Engine(model, kv=kv)
    for last, cached in ((50, 0), (60, 40)):
        one = request([*SYSTEM, last, *range(last + 1, last + 30)], snapshot_at=40)
        found = engine.submit(one).result()
        assert found.cached_tokens == cached
        same(found, alone(model, one, kv))


def test_long_prompts_are_read_between_steps(lm):
    """No row waits for longer than one chunk, and several prompts are read in turn."""
    model = recording(lm, max_position_embeddings=8192)
    engine = Engine(model, prefix_cache_bytes=0)
    pause = model.model.pause_at(5)
    running = engine.submit(request([5, 6], 60))
    long = [request([100 + i, *[7] * 1000], 4) for i in range(2)]
    pause.reach()
    streams = [engine.submit(long[0])]
    second = model.model.pause_at(8)
    pause.resume()
    second.reach()
    streams.append(engine.submit(long[1]))
    second.resume()
    found = [stream.result() for stream in streams]
    result = running.result()
    sizes = [columns for _, columns in model.model.calls]
    chunks = [i for i, size in enumerate(sizes) if size > 1]
    assert all(after - before > 1 for before, after in pairwise(chunks)), "a step between any two chunks"
    first = chunk_size(model.config, model.weight_bytes, 0)
    assert len(chunks) >= 2 * 1000 / first and sizes[chunks[0]] == min(first, 1000)
    if ON_CPU:
        assert len(chunks) >= 8 and sizes[chunks[0]] > sizes[chunks[3]] >= sizes[chunks[7]], [sizes[i] for i in chunks]
    assert result.tokens == alone(model, request([5, 6], 60)).tokens
    for one, result in zip(long, found, strict=True):
        same(result, alone(model, one))


@pytest.mark.skipif(not ON_CPU, reason="a GPU has other chunks")
@pytest.mark.parametrize("num_read", [0, 100, 1000, 10_000, 1_000_000])
def test_all_chunks_take_about_as_long(lm, num_read):
    def cost(first, count):
        return sum(_token_cost(lm.config, n) for n in range(first, first + count))

    size = chunk_size(lm.config, lm.weight_bytes, num_read)
    assert size == MIN_CHUNK_TOKENS or 0.7 < cost(num_read, size) / cost(0, 512) < 1.1
    assert chunk_size(object(), 0, num_read) == chunk_size(lm.config, lm.weight_bytes, 0) == PREFILL_STEP_SIZE == 512


@pytest.mark.skipif(ON_CPU, reason="chunks of a GPU")
@pytest.mark.parametrize("bytes_per_parameter", [0.5625, 2, 4, 64])
def test_a_chunk_takes_about_as_long_as_a_step_on_a_gpu(bytes_per_parameter, simulated_gpu):
    """Of 10.4 TFLOP/s and 0.4 TB/s, an M1 Max's, and of an H200's; a step reads the weights."""
    config = load_preset("1b")
    weight_bytes = int(bytes_per_parameter * config.parameter_count())
    flops, bandwidth = (10.4e12, 0.4e12) if simulated_gpu.device.backend == "metal" else (989e12, 4.8e12)
    for num_read in (0, 1000, 30_000):
        size = chunk_size(config, weight_bytes, num_read)
        ratio = size * _token_cost(config, num_read) / flops / (weight_bytes / bandwidth)
        assert 0.8 < ratio < 1.3 or (size == MIN_CHUNK_TOKENS and ratio > 1) or (size == 2048 and ratio < 1)


def test_a_prompt_that_fails_to_be_read_fails_alone(lm):
    model = recording(lm)
    engine = Engine(model)
    good = request([5, 6, 7], 30)

    def fail():
        model.model._pauses.clear()
        raise RuntimeError("out of memory")

    pause = model.model.pause_at(5)
    first = engine.submit(good)
    pause.reach()
    model.model.pause_at(6).hold = fail
    second = engine.submit(request(SYSTEM))
    pause.resume()
    with pytest.raises(RuntimeError, match="out of memory"):
        second.result()
    same(first.result(), alone(lm, good))
    same(engine.submit(request(SYSTEM)).result(), alone(lm, request(SYSTEM)))


def test_the_log_explains_what_the_prefix_cache_lacks(lm, caplog):
    engine = Engine(lm)
    options = GenerationOptions(temperature=0, max_tokens=1)
    engine.submit(Request([5, 6, 7, 8, 9], options)).result()
    with caplog.at_level("DEBUG", "mlxlm"):
        engine.submit(Request([5, 6, 70, 8, 9], options)).result()
    new, cached = (lm.tokenizer.decode([id]) for id in (70, 7))
    message = f"2 of 4 prompt tokens are in the prefix cache; token 2 is {new!r}, and {cached!r} in the text"
    assert caplog.messages[-1].startswith(message)


def test_a_gpu_computes_a_chunk_while_the_graph_of_the_next_is_built(lm, monkeypatch):
    evaluations = []
    for name in ("eval_arrays", "async_eval_arrays"):
        original = getattr(device_memory, name)
        monkeypatch.setattr(
            device_memory, name, lambda *a, name=name, original=original: evaluations.append(name) or original(*a)
        )
    Context(lm.model).read([5, 6, 7], prefill_step_size=1)
    first = "eval_arrays" if ON_CPU else "async_eval_arrays"
    assert evaluations == [first, first, "eval_arrays"]


def test_what_was_read_of_a_prompt_is_kept_when_its_reader_leaves(lm):
    model = recording(lm, max_position_embeddings=8192)
    engine, one = Engine(model), request([5, *[7] * 3 * PREFILL_STEP_SIZE], 2)
    pause = model.model.pause_at(1)
    stream = engine.submit(one)
    pause.reach()
    stream.cancel()
    pause.resume()
    again = engine.submit(one).result()
    assert again.cached_tokens == 2 * PREFILL_STEP_SIZE and again.tokens == alone(model, one).tokens
