"""The worked figures of the literature, to the digits that are printed there."""

import pytest

from mlxlm.config import ModelConfig
from mlxlm.plan import (
    Serving,
    Training,
    count_training_flops,
    find_config,
    flops_by_length,
    inference_memory,
    plan,
    textbook,
)
from mlxlm.plan.planner import seconds_for

DAY = 86_400
GPT3 = {"h": 12288, "layers": 96}


def test_llama3_405b():
    """126 layers, hidden 16384, FFN 53248, 128 heads, 8 key-value heads, vocabulary 128,256."""
    config = find_config("llama3-405b")
    assert round(config.parameter_count() / 1e9, 1) == 405.9
    planned = plan("llama3-405b", machine="h100")
    per_layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    assert planned.parameter_count == 126 * per_layer + 2 * 128_256 * 16384 + 16384
    assert sum(planned.parameters.values()) == config.parameter_count()


@pytest.mark.parametrize(
    ("name", "billions", "dense"), [("7b", 6.7, 6.4), ("13b", 13.0, 12.6), ("33b", 32.5, 31.9), ("65b", 65.2, 64.4)]
)
def test_llama_and_the_dense_formula(name, billions, dense):
    """The paper's 65.2 is 65.286 cut off; the others are the same cut off or rounded."""
    config = find_config(f"llama-{name}")
    assert int(config.parameter_count() / 1e8) / 10 == billions
    assert round(textbook.dense_parameters(config.hidden_size, config.num_hidden_layers) / 1e9, 1) == dense


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
    assert round(textbook.dense_parameters(**GPT3) / 1e9) == 174  # without embeddings and biases


def test_bytes_per_parameter():
    assert textbook.inference_bytes(7) == 2 * 7
    assert sum(textbook.training_bytes(7).values()) == 20 * 7
    assert inference_memory(find_config("llama-7b"), Serving()).weights == 2 * 6738415616


@pytest.mark.parametrize("name", ["gpt3-175b"])
@pytest.mark.parametrize("length", [1, 512, 2048])
def test_forward_flops_of_gpt3(name, length):
    """24bsh² + 4bs²h for each layer and 2bshV: what is counted part by part comes to that."""
    config = find_config(name)
    training = Training(batch_size=4, max_seq_length=length)
    counted = count_training_flops(config, training).forward_total * training.tokens_per_step
    assert counted == textbook.forward_flops(4, length, 12288, 96, config.vocab_size)
    assert textbook.forward_flops(1, 10, 3, 1, 7) == 24 * 10 * 9 + 4 * 100 * 3 + 2 * 10 * 3 * 7


def test_training_flops():
    assert textbook.training_flops(174.6e9, 300e9) == pytest.approx(3.1428e23)
    assert textbook.training_flops(174.6e9, 300e9, grad_checkpoint=True) == pytest.approx(3.1428e23 * 8 / 6)
    flops = count_training_flops(find_config("gpt3-175b"), Training(batch_size=1, max_seq_length=2048))
    assert flops.backward == 2 * flops.forward_total
    assert flops.per_token == pytest.approx(6 * 174.6e9, rel=0.03)  # the scores are the 3 %
    again = count_training_flops(
        find_config("gpt3-175b"), Training(batch_size=1, max_seq_length=2048, grad_checkpoint=True)
    )
    assert again.per_token == pytest.approx(8 * 174.6e9, rel=0.03)
    assert again.per_token - flops.per_token == flops.forward_total - flops.forward["head"]


def test_days_of_gpt3():
    flops = textbook.training_flops(174.6e9, 300e9, grad_checkpoint=True)
    assert round(seconds_for(flops, 312e12, 0.45, 1024) / DAY) == 34


def test_days_of_llama_65b():
    """21.98 days, which are printed as 21."""
    flops = textbook.training_flops(65e9, 1.4e12, grad_checkpoint=True)
    days = seconds_for(flops, 624e12, 0.3, 2048) / DAY
    assert int(days) == 21 and round(days, 2) == 21.98


def test_activations_of_gpt3():
    figure = {"s": 2048, "h": 12288, "a": 96, "layers": 96}
    assert round(textbook.activation_bytes(1, **figure) / 1e9) == 275
    assert round(textbook.activation_bytes(64, **figure) / 1e12, 1) == 17.6


def test_cache_of_gpt3():
    expected = 4 * 96 * 64 * 12288 * (512 + 32)
    assert textbook.cache_bytes(64, **GPT3, prompt=512, generated=32) == expected
    assert round(expected / 1e9) == 164
    assert inference_memory(find_config("gpt3-175b"), Serving(num_sequences=64, context_length=544)).cache == expected


@pytest.mark.parametrize(
    ("name", "length", "shares"),
    [
        # by hand: 2·(h·(q + 2kv)), 2·q·s, 2·q·s, 2·q·h, 6·h·ffn in each layer, and 2·h·V
        ("llama-7b", 4096, {"projections": 3 * 2**24, "scores": 2**24, "scores_values": 2**24, "output": 2**24,
                            "feed_forward": 3 * 4096 * 11008, "head": 4096 * 32000 / 32}),
        ("qwen2-0.5b", 512, {"projections": 896 * (896 + 256), "scores": 896 * 512, "scores_values": 896 * 512,
                             "output": 896**2, "feed_forward": 3 * 896 * 4864, "head": 896 * 151936 / 24}),
        ("llama3-405b", 8192, {"projections": 16384 * (16384 + 2048), "scores": 16384 * 8192,
                               "scores_values": 16384 * 8192, "output": 16384**2,
                               "feed_forward": 3 * 16384 * 53248, "head": 16384 * 128256 / 126}),
    ],
)  # fmt: skip
def test_forward_flops_by_component(name, length, shares):
    [found] = flops_by_length(find_config(name), [length])
    assert found.shares == pytest.approx({part: x / sum(shares.values()) for part, x in shares.items()})
