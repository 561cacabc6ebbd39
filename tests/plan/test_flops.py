"""The worked figures of the literature, to the digits that are printed there."""

import pytest

from mlxlm.config import ModelConfig
from mlxlm.plan import Serving, Training, count_training_flops, find_config, inference_memory, plan
from mlxlm.plan.planner import seconds_for

DAY = 86_400


def test_llama3_405b():
    """126 layers, hidden 16384, FFN 53248, 128 heads, 8 key-value heads, vocabulary 128,256."""
    config = find_config("llama3-405b")
    assert round(config.parameter_count() / 1e9, 1) == 405.9
    planned = plan("llama3-405b", machine="h100")
    per_layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    assert planned.parameter_count == 126 * per_layer + 2 * 128_256 * 16384 + 16384
    assert sum(planned.parameters.values()) == config.parameter_count()


@pytest.mark.parametrize(("name", "billions"), [("7b", 6.7), ("13b", 13.0), ("33b", 32.5), ("65b", 65.2)])
def test_llama(name, billions):
    """The paper's 65.2 is 65.286 cut off; the others are the same cut off or rounded."""
    config = find_config(f"llama-{name}")
    assert int(config.parameter_count() / 1e8) / 10 == billions


@pytest.mark.parametrize("h", [64, 768, 12288])
def test_a_dense_gpt_layer(h):
    def gpt(layers):
        return ModelConfig(
            h, layers, 16, 4 * h, 100, norm="layer", attention_bias=True, mlp_bias=True, mlp_gated=False,
            positions="learned", tie_word_embeddings=True, hidden_act="gelu_new",
        ).parameter_count()  # fmt: skip

    assert gpt(3) - gpt(2) == 12 * h**2 + 13 * h


def test_gpt3():
    config = find_config("gpt3-175b")
    assert (config.num_hidden_layers, config.hidden_size) == (96, 12288)
    assert round(config.parameter_count() / 1e9) == 175
    assert round(config.parameter_count() / 1e9, 1) == 174.6


@pytest.mark.parametrize("length", [1, 512, 2048])
def test_forward_flops_of_gpt3(length):
    """Narayanan et al. 2021, "Megatron-LM", appendix: l·(24bsh² + 4bs²h) + 2bshV."""
    config, b, h, layers = find_config("gpt3-175b"), 4, 12288, 96
    training = Training(batch_size=b, max_seq_length=length)
    counted = count_training_flops(config, training).forward_total * training.tokens_per_step
    expected = layers * (24 * b * length * h**2 + 4 * b * length**2 * h) + 2 * b * length * h * config.vocab_size
    assert counted == expected


def test_training_flops():
    flops = count_training_flops(find_config("gpt3-175b"), Training(batch_size=1, max_seq_length=2048))
    assert flops.backward == 2 * flops.forward_total
    assert flops.per_token == pytest.approx(6 * 174.6e9, rel=0.03)  # the scores are the 3 %
    again = count_training_flops(
        find_config("gpt3-175b"), Training(batch_size=1, max_seq_length=2048, grad_checkpoint=True)
    )
    assert again.per_token == pytest.approx(8 * 174.6e9, rel=0.03)
    assert again.per_token - flops.per_token == flops.forward_total - flops.forward["head"]


def test_days_of_gpt3():
    flops = 8 * 174.6e9 * 300e9
    assert round(seconds_for(flops, 312e12, 0.45, 1024) / DAY) == 34


def test_days_of_llama_65b():
    """21.98 days, which are printed as 21."""
    flops = 8 * 65e9 * 1.4e12
    days = seconds_for(flops, 624e12, 0.3, 2048) / DAY
    assert int(days) == 21 and round(days, 2) == 21.98


def test_memory_of_inference():
    assert inference_memory(find_config("llama-7b"), Serving()).weights == 2 * 6738415616
    gpt3 = inference_memory(find_config("gpt3-175b"), Serving(num_sequences=64, context_length=512 + 32))
    assert gpt3.cache == 4 * 96 * 64 * 12288 * (512 + 32)


@pytest.mark.parametrize(
    ("name", "length", "parts"),
    [
        # by hand, in each layer and half of the operations: h·(q + 2kv), q·s, q·s, q·h, 3·h·ffn; and h·V
        ("llama-7b", 4096, {"projections": 3 * 2**24, "scores": 2**24, "scores_values": 2**24, "output": 2**24,
                            "feed_forward": 3 * 4096 * 11008, "head": 4096 * 32000 / 32}),
        ("qwen2-0.5b", 512, {"projections": 896 * (896 + 256), "scores": 896 * 512, "scores_values": 896 * 512,
                             "output": 896**2, "feed_forward": 3 * 896 * 4864, "head": 896 * 151936 / 24}),
        ("llama3-405b", 8192, {"projections": 16384 * (16384 + 2048), "scores": 16384 * 8192,
                               "scores_values": 16384 * 8192, "output": 16384**2,
                               "feed_forward": 3 * 16384 * 53248, "head": 16384 * 128256 / 126}),
    ],
)  # fmt: skip
def test_forward_flops_by_component(name, length, parts):
    config = find_config(name)
    found = count_training_flops(config, Training(max_seq_length=length)).forward
    assert found == pytest.approx({part: 2 * config.num_hidden_layers * x for part, x in parts.items()})
