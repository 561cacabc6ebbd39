"""Texts of models whose caches differ in batches, on every kind of cache, from a prefix cache and from a file."""

from dataclasses import replace

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, make_cache, open_prompt_cache, save_prompt_cache
from mlxlm.generation import Engine
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from tests.generation.texts import SYSTEM, alone, request

SHARED = ("sliding_attention", "full_attention") * 2
KINDS = {
    "latent attention": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 24,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 32, "v_head_dim": 20,
    },
    "shared keys and values": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SHARED, "sliding_window": 30, "head_dim": 32,
        "global_head_dim": 96, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "value_norm": True,
    },
}  # fmt: skip
CACHES = {"default": KVOptions(), "8 and 4 bits": KVOptions.of(bits="8,4"), "rotating": KVOptions.of(size=24, keep=2)}


@pytest.fixture(scope="module", params=KINDS)
def changed(lm, request):
    config = lm.config.with_changes(**KINDS[request.param])
    model = Decoder(config)
    model.init_weights(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20
    mx.eval(model.parameters())
    return replace(lm, model=model.eval(), config=config)


@pytest.mark.parametrize("kind", CACHES)
def test_texts_of_a_batch(changed, kind):
    kv = CACHES[kind]
    requests = [request(SYSTEM[:n], 12, temperature=0) for n in (3, 40, 17)] + [request([*SYSTEM[:30], 7], 12)]
    wanted = [alone(changed, one, kv).tokens for one in requests]
    engine = Engine(changed, kv=kv)
    for _ in range(2):  # the second time from the prefix cache
        streams = [engine.submit(one) for one in requests]
        assert [stream.result().tokens for stream in streams] == wanted
    assert kind == "rotating" or engine.stats.cached_tokens > 0


def test_several_tokens_at_once(changed):
    one = request(SYSTEM[:20] * 2, 20, temperature=0)
    found = Engine(changed, speculation=SpeculativeDecoder(PromptLookup())).submit(one).result()
    assert found.tokens == alone(changed, one).tokens


@pytest.mark.parametrize("kind", CACHES)
def test_files_and_memory(changed, kind, tmp_path):
    caches, again = (make_cache(changed.model, CACHES[kind]) for _ in range(2))
    prompt = mx.array([SYSTEM[:20]])
    changed.model(prompt, caches)
    save_prompt_cache(tmp_path / "text", caches, SYSTEM[:20], {})
    open_prompt_cache(tmp_path / "text").load(again)
    token = mx.array([[5]])
    assert mx.array_equal(changed.model(token, again), changed.model(token, caches))
    held = sum(cache.nbytes for cache in caches)
    assert KVMemory(changed, CACHES[kind], 1 << 30).bytes_for(caches[-1].capacity) == pytest.approx(held, rel=0.01)
