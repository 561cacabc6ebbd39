"""Models of each family: written, read back to the bit, and run by llama.cpp."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, huggingface
from mlxlm.checkpoint.gguf.config_to_gguf import architecture_for
from mlxlm.checkpoint.gguf.rope import llama3_factors, llama3_scaling
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import load_weights
from mlxlm.families import config_from_hf, config_to_hf
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import MODELS, random_model, tensors_of


def bits(value: mx.array) -> bytes:
    return np.array(value.astype(mx.bfloat16).view(mx.uint16)).tobytes()


def test_a_file_read_back_is_the_same_model(model, tensors, tiny_tokenizer, tmp_path):
    written = gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "BF16")
    again = open_checkpoint(tmp_path / "m.gguf")
    assert not written.others
    assert again.config == model.config
    assert again.hf_config["model_type"] == model.config.model_type
    assert set(again.tensors) == set(tensors)
    for name, tensor in again.tensors.items():
        value = tensor.read()
        assert (tensor.shape, tensor.dtype) == (tuple(value.shape), value.dtype), name
        assert bits(value) == bits(tensors[name].read()), name


def test_folder_to_gguf_to_folder_keeps_every_bit(model, tiny_tokenizer, tmp_path):
    config, path = model.config, tmp_path / "m.gguf"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    huggingface.write(tmp_path / "a", config_to_hf(config), config, tensors_of(model, mx.bfloat16), tiny_tokenizer)
    first = open_checkpoint(tmp_path / "a")
    gguf.write(path, first.config, first.tensors, first.load_tokenizer(), "BF16")
    second = open_checkpoint(path)
    sixteen = {name: tensor.astype(mx.bfloat16) for name, tensor in second.tensors.items()}
    huggingface.write(tmp_path / "b", second.hf_config, second.config, sixteen, second.load_tokenizer())
    before, after = load_weights(tmp_path / "a"), load_weights(tmp_path / "b")
    assert {name: bits(value) for name, value in before.items()} == {name: bits(value) for name, value in after.items()}
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "a" / name).read_text()) == json.loads((tmp_path / "b" / name).read_text())


def test_llama_cpp_computes_the_same(model, tensors, tiny_tokenizer, tmp_path, open_llama_cpp):
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "F32")
    theirs = open_llama_cpp(tmp_path / "m.gguf", logits_all=True)
    tokens = np.random.default_rng(0).integers(0, 300, 40).tolist()
    theirs.eval(tokens)
    expected = np.array(theirs.scores[: len(tokens)])
    logits = np.array(model(mx.array([tokens]))[0])
    # llama.cpp takes GELU from a table in float16, and has no other form of it than with tanh.
    assert np.abs(logits - expected).max() < 0.01 * logits.std()
    for _ in range(16):
        tokens.append(int(expected[-1].argmax()))
        theirs.eval(tokens[-1:])
        expected = np.array(theirs.scores[len(tokens) - 1 : len(tokens)])
    greedy = np.array(model(mx.array([tokens]))[0]).argmax(-1)
    assert greedy[39:-1].tolist() == tokens[40:]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("scaling", [(32.0, 1.0, 4.0, 8192), (8.0, 2.0, 6.0, 8192), (4.0, 1.0, 4.0, 500)])
def test_llama_3_scaling_is_found_in_the_factors(scaling, told):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rule = {"rope_type": "llama3", **dict(zip(names, scaling, strict=True))}
    factors = llama3_factors(rule, 500_000.0, 64)
    found = llama3_scaling(factors, 500_000.0, [scaling[-1]] if told else [])
    if not told:  # the same rule for the original length of a low_freq_factor of 1
        low = rule["low_freq_factor"]
        rule |= {"low_freq_factor": 1.0, "high_freq_factor": rule["high_freq_factor"] / low}
        rule["original_max_position_embeddings"] /= low
    assert found.pop("rope_type") == rule.pop("rope_type")
    assert found == pytest.approx(rule, rel=1e-3)
    assert llama3_scaling(factors + np.float32(0.3), 500_000.0, [8192]) is None


REFUSED = {
    "llama": [{"hidden_act": "relu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}],
    "qwen2": [{"head_dim": 32}],
    "gemma2": [{"query_pre_attn_scalar": 64}, {"attn_logit_softcapping": None}, {"layer_types": None}],
    "gpt2": [{"mlp_bias": False}],
}


@pytest.mark.parametrize("name, change", [(name, change) for name in REFUSED for change in REFUSED[name]])
def test_what_llama_cpp_lacks_is_refused_by_name(name, change, tiny_tokenizer, tmp_path):
    model = random_model(name, tiny_tokenizer)
    config = model.config.with_changes(**change)
    with pytest.raises(CheckpointError, match=next(iter(change)) if "rope_scaling" not in change else "rope_type"):
        gguf.write(tmp_path / "m.gguf", config, tensors_of(model), tiny_tokenizer, "F16")
    assert not list(tmp_path.iterdir())


def test_opt_has_no_place_in_gguf():
    opt = {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64,
        "vocab_size": 300, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="no opt models"):
        architecture_for(config_from_hf(opt))


def test_an_existing_file_stays(tiny_tokenizer, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    model = random_model("llama", tiny_tokenizer)
    with pytest.raises(CheckpointError, match="already exists"):
        gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    assert path.read_text() == "mine"


def test_a_tied_olmo_gets_a_head(tiny_tokenizer, tmp_path):
    """llama.cpp's OLMo 2 asks for output.weight."""
    model = random_model("olmo2", tiny_tokenizer)
    config = model.config.with_changes(tie_word_embeddings=True)
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != "lm_head.weight"}
    gguf.write(tmp_path / "m.gguf", config, tensors, tiny_tokenizer, "F32")
    again = open_checkpoint(tmp_path / "m.gguf")
    embedding, head = (again.tensors[f"{name}.weight"].read() for name in ("model.embed_tokens", "lm_head"))
    assert bits(embedding) == bits(head)


def test_windows_that_llama_cpp_ignores_are_said(tiny_tokenizer, tmp_path):
    model = random_model("mistral", tiny_tokenizer)
    written = gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F16")
    assert any("beyond 64 tokens" in note for note in written.notes)


def test_numbers_that_the_format_lacks_are_named(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    scaling = {**MODELS["llama-3"]["rope_scaling"], "original_max_position_embeddings": 2**33}
    config = model.config.with_changes(rope_scaling=scaling)
    with pytest.raises(CheckpointError, match=r"original_context_length is .*8589934592"):
        gguf.write(tmp_path / "m.gguf", config, tensors_of(model), tiny_tokenizer, "F16")
    assert not list(tmp_path.iterdir())
