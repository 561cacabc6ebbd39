"""Models of mlx_lm's classes in the engine: with each kind of cache, texts share batches and prefixes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import KVOptions, make_cache
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.checkpoint.mlx_lm.model import build_model
from mlxlm.checkpoint.tensor_parallel import shard_with_mlx_lm
from mlxlm.generation import Context, Engine, LoadedModel, prefill, run_batch
from mlxlm.generation.decode_step import DecodeStep, LayerStep
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.utils.errors import CheckpointError, GenerationError
from tests.checkpoint.test_tensor_parallel import close, logits_of
from tests.generation.test_batching import requests
from tests.generation.texts import alone, greedy, request, same
from tests.small_models import arrays_of
from tests.split_model import MlxGroup, thread_groups

pytest.importorskip("mlx_lm", reason="mlx_lm is not installed")

BASE = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 600,
    "tie_word_embeddings": True,
}  # fmt: skip
KINDS = {  # by the kinds of their caches
    "sliding windows": ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "recurrent": (
        "mamba", {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
    ),
    "recurrent and full": (
        "olmo_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"], "attention_bias": False,
            "linear_allow_neg_eigval": True, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        },
    ),
    "two in a layer": (
        "falcon_h1",
        {
            "mamba_d_conv": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_groups": 1,
            "mamba_n_heads": 4, "mamba_expand": 1, "mamba_chunk_size": 8, "mamba_norm_before_gate": False,
            "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mamba_conv_bias": True,
        },
    ),
}  # fmt: skip
DIVISIBLE = (  # recurrent and full, in a class that mlx_lm can divide
    "qwen3_5",
    {
        "text_config": {
            **BASE, "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_value_heads": 4,
            "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        }
    },
)  # fmt: skip
POSITIONS = "positions as numbers"  # of gpt_bigcode, which needs its position in Python


class Recorded:
    """A model that notes the rows of each call."""

    rows: ClassVar[list[int]] = []

    def __call__(self, inputs, cache=None, **options):
        self.rows.append(len(inputs))
        return super().__call__(inputs, cache=cache, **options)


@pytest.fixture(scope="module")
def models(lm):
    def recorded(model_type, values):
        model = build(model_type, values)
        model.__class__ = type("Recorded", (Recorded, type(model)), {})
        return LoadedModel(model, lm.tokenizer, MlxLmConfig(model_type, 300, 600, frozenset()), lm.path)

    made = {name: recorded(*kind) for name, kind in KINDS.items()}
    return {
        **made,
        POSITIONS: recorded(
            "gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 600, "layer_norm_epsilon": 1e-5}
        ),
    }


@settings(max_examples=8)
@given(st.sampled_from(list(KINDS)), st.lists(requests, min_size=2, max_size=6), st.sampled_from([None, "8"]))
def test_a_text_is_the_one_that_its_request_gives_alone(models, kind, wanted, bits):
    lm, kv = models[kind], KVOptions.of(bits=bits)
    for index, result in run_batch(Engine(lm, kv=kv, batch_size=4), wanted):
        same(result, alone(lm, wanted[index], kv))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_share_a_batch(models, kind):
    Recorded.rows.clear()
    wanted = [greedy([*range(5, 9 + 3 * i)]) for i in range(6)]
    found = dict(run_batch(Engine(models[kind]), wanted))
    assert Recorded.rows.count(6) >= 2
    for index, result in found.items():
        same(result, alone(models[kind], wanted[index]))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_give_the_logits_of_the_model(models, kind):
    model = models[kind].model
    for kv in (KVOptions(), KVOptions.of(size=128), KVOptions.of(bits=8))[: 1 if kind == "recurrent" else 3]:
        step, rows = DecodeStep(model), 1 if kv.key_bits else 2
        own, compiled = make_cache(model, kv), make_cache(model, kv)
        prompt = mx.array(np.random.default_rng(0).integers(0, 300, (rows, 122)))
        for caches in (own, compiled):
            model(prompt, cache=caches)
        for token in range(9):  # a cache of 128 positions drops tokens
            tokens = mx.array([[token + row] for row in range(rows)])
            wanted, found = model(tokens, cache=own)[:, -1], step(tokens, compiled)
            assert np.abs(np.array(found - wanted)).max() < 1e-3 * np.array(wanted).std()
        assert not step._differs and any(callable(entry) for entry in step._steps.values())


@pytest.mark.parametrize("kind", ["windows that it ignores", POSITIONS])
def test_a_step_with_other_logits_is_not_compiled(models, kind, caplog):
    model = models[kind if kind == POSITIONS else "sliding windows"].model

    class Careless(nn.Module):
        model_type = "careless"

        def __init__(self):
            super().__init__()
            self.inner = model

        def __call__(self, tokens, cache=None):
            for layer_cache in cache:
                if isinstance(layer_cache, LayerStep) and kind != POSITIONS:
                    layer_cache.mask = lambda window, mask=layer_cache.mask: mask(None)
            return model(tokens, cache=cache)

    careless = Careless()
    careless.eval()
    caplog.set_level("INFO", "mlxlm.generation.decode_step")
    own, others, step = make_cache(model), make_cache(model), DecodeStep(careless)
    for caches in (own, others):
        model(mx.array([[*range(30)]]), cache=caches)
    for token in range(6):
        wanted, found = model(mx.array([[token]]), cache=own)[:, -1], step(mx.array([[token]]), others)
        assert np.allclose(np.array(found), np.array(wanted), atol=1e-5)
    (record,) = caplog.records
    assert record.message.startswith("careless decodes without a compiled step")


def test_texts_of_a_model_without_batches(models):
    lm = models[POSITIONS]
    assert not lm.supports_batching
    wanted = [greedy([5, 6, 7 + i]) for i in range(6)]
    for index, result in run_batch(Engine(lm), wanted):
        same(result, alone(lm, wanted[index]))


def test_weights_that_a_model_replaces_do_not_belong_to_the_thread_that_made_its_engine(models):
    """Gemma 3n's forward pass assigns weights, even that which only finds out whether texts can share a batch."""
    lm = models["sliding windows"]

    class Clips(type(lm.model)):
        def __call__(self, *args, **options):
            self.model.norm.weight = mx.clip(self.model.norm.weight, -10, 10)
            return super().__call__(*args, **options)

    clipping = Clips(lm.model.args)
    clipping.update(lm.model.parameters())
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(Engine, replace(lm, model=clipping)).result()
    same(engine.submit(greedy([5, 6, 7])).result(), alone(lm, greedy([5, 6, 7])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_reads_no_more_than_an_interval_again(models, kind, monkeypatch):
    """Where a prompt leaves an earlier one within that, and at its end, where nothing is read again."""
    monkeypatch.setattr(prefill, "SNAPSHOT_INTERVAL", 32)
    engine = Engine(models[kind])
    first = [*range(1, 200)]
    answer = engine.submit(request(first, snapshot_at=150)).result()
    follow_up = [*first, *answer.tokens, *range(40, 60)]
    assert engine.submit(request(follow_up)).result().cached_tokens >= len(first) - 1
    for length in (40, 100, 190):
        wanted = request([*first[:length], 299, 2, 3])
        result = engine.submit(wanted).result()
        assert length - 32 <= result.cached_tokens <= length
        same(result, alone(models[kind], wanted))


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=128), KVOptions.of(bits="8,4")], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, POSITIONS])
def test_the_estimate_is_what_caches_take(models, kind, kv):
    context = Context(models[kind].model, kv)
    context.read([7] * 510, 16)
    context.read([7]), context.read([7])
    nbytes = sum(cache.nbytes for cache in context.caches)
    assert KVMemory(models[kind], kv, 0).bytes_for(512) == pytest.approx(nbytes, rel=0.15)


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


def build(kind, values):
    mx.random.seed(3)
    model, _ = build_model({"model_type": kind, **BASE, **values})
    mx.eval(model.parameters())
    return model.eval()


def test_mlx_lm_divides_its_models_over_processes(monkeypatch):
    whole, *parts = [build(*DIVISIBLE) for _ in range(3)]
    expected = logits_of(whole)
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: group.ranks.all_sum(x))

    def run(model, group):
        group.mlx_group = MlxGroup(group)
        shard_with_mlx_lm(model, group, Path("here"))
        return logits_of(model)

    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(run, parts, thread_groups(2)):
            close(logits, expected)
    sizes = [sum(x.nbytes for x in arrays_of(model).values()) for model in (whole, *parts)]
    assert max(sizes[1:]) < 0.8 * sizes[0]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(KINDS["recurrent"], "mlx_lm has no tensor parallelism"), (DIVISIBLE, ".*fewer processes")],
)
def test_models_that_mlx_lm_cannot_divide(kind, problem):
    group = thread_groups(3)[0]
    group.mlx_group = MlxGroup(group)
    with pytest.raises(CheckpointError, match=f"here can't be split over 3 processes: {problem}"):
        shard_with_mlx_lm(build(*kind), group, Path("here"))
