"""Models of mlx_lm's classes: compiled steps, and tensor parallelism."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import KVOptions, make_cache
from mlxlm.checkpoint.tensor_parallel import shard_with_mlx_lm
from mlxlm.generation import Engine, run_batch
from mlxlm.generation.decode_step import DecodeStep, LayerStep
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.test_tensor_parallel import close, logits_of
from tests.generation.cache_models import BASE, MLX_LM_MODELS, POSITIONS, WITH_BATCHES, build
from tests.generation.texts import alone, greedy, same
from tests.small_models import arrays_of
from tests.split_model import MlxGroup, thread_groups

pytest.importorskip("mlx_lm", reason="mlx_lm is not installed")

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


@pytest.mark.parametrize("kind", WITH_BATCHES)
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
    [(MLX_LM_MODELS["recurrent"], "mlx_lm has no tensor parallelism"), (DIVISIBLE, ".*fewer processes")],
)
def test_models_that_mlx_lm_cannot_divide(kind, problem):
    group = thread_groups(3)[0]
    group.mlx_group = MlxGroup(group)
    with pytest.raises(CheckpointError, match=f"here can't be split over 3 processes: {problem}"):
        shard_with_mlx_lm(build(*kind), group, Path("here"))
