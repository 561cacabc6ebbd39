"""Models of mlx_lm built from config.json."""

import sys

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.mlx_lm import model as mlx_lm_model
from mlxlm.checkpoint.mlx_lm.model import build_model
from mlxlm.utils.errors import CheckpointError

pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")


@pytest.mark.parametrize("kind", ["os", "base", "cache", "..utils", "granite.ModelArgs", "../granite", "gpt_neo", ""])
def test_only_models_of_mlx_lm_are_imported(write, kind):
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=f"neither mlxlm nor mlx_lm has a model for model_type {kind!r}"):
        load_model(write(model_type=kind))
    assert {name for name in set(sys.modules) - before if not name.startswith(("mlx_lm.", "encodings."))} <= {"mlx_lm"}


def test_module_that_exits_is_an_error(write, capsys):
    if "hf_olmo" in sys.modules:
        pytest.skip("the package that mlx_lm's olmo needs is installed")
    with pytest.raises(CheckpointError, match="olmo can't be imported: .*try: pip install ai2-olmo"):
        load_model(write(model_type="olmo", d_model=32))
    with pytest.raises(CheckpointError, match="needs a config.json with d_model"):
        load_model(write(model_type="olmo"))
    assert capsys.readouterr().out == ""


TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "sliding_window": 16, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}  # fmt: skip
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
MULTIMODAL = {
    "gemma3": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "gemma3n": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97, "max_position_embeddings": 128, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.0] * 6,
        "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": 4, "intermediate_size": [48] * 6,
    },
    "gemma4": {
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision", "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "rope_parameters": ROPE,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_text_config_of_multimodal_models(kind):
    text = {**TEXT, **MULTIMODAL[kind], "model_type": f"{kind}_text"}
    model, limit = build_model({"model_type": kind, "text_config": text})
    assert limit is None
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 97)
    assert model.layers[0].self_attn.head_dim == 256  # that of every Gemma whose file has none
    with pytest.raises(CheckpointError, match="use_bidirectional_attention is 'all'"):
        build_model({"model_type": kind, "text_config": {**text, "use_bidirectional_attention": "all"}})


def test_default_sizes_of_the_architecture(tmp_path):
    text = {**TEXT, **MULTIMODAL["gemma3"], "model_type": "gemma3_text"}
    del text["vocab_size"], text["layer_types"]
    values = {"model_type": "gemma3", "text_config": text}
    model, _ = build_model(values)
    assert mlx_lm_model._count(text, model, "vocab_size") == 262_208
    assert mlx_lm_model._count(text, model, "max_position_embeddings") == 131_072
