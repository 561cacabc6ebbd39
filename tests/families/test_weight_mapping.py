"""Tensor names in the files of each family."""

import pytest

from mlxlm.families import normalize_tensor_name
from tests.families.published import read_published


@pytest.mark.parametrize(
    ("name", "name_in_file", "expected"),
    [
        ("gpt2", "transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt2", "h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt2", "h.0.attn.bias", None),
        ("gpt2", "lm_head.weight", None),
        ("gpt2", "model.h.0.ln_1.weight", "model.h.0.ln_1.weight"),
        ("opt-125m", "decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("opt-125m", "layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("bloom-560m", "word_embeddings.weight", "transformer.word_embeddings.weight"),
        ("SmolLM2-135M", "layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("SmolLM2-135M", "model.layers.1.self_attn.rotary_emb.inv_freq", None),
        ("Mistral-7B-v0.1", "lm_head.weight", "lm_head.weight"),
        ("pythia-70m", "lm_head.weight", "embed_out.weight"),
        ("pythia-70m", "gpt_neox.layers.0.attention.masked_bias", None),
        ("gpt2", "score.weight", "score.weight"),
    ],
)
def test_normalize_tensor_name(name, name_in_file, expected):
    assert normalize_tensor_name(read_published(name), name_in_file) == expected
