"""Models that only mlx_lm implements: built from config.json, loaded, and the errors."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint import load_model, save_weights
from mlxlm.checkpoint.mlx_lm import model as mlx_lm_model
from mlxlm.checkpoint.mlx_lm.model import build_model
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.cli.main import _run
from mlxlm.convert.inspect import describe
from mlxlm.utils.errors import CheckpointError

GRANITE = {
    "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """`write(name=value, ...)`: a folder of a Granite mixture with these fields; None removes one."""

    def write(**changes):
        values = {name: value for name, value in {**GRANITE, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        save_weights(tmp_path, {"model.embed_tokens.weight": mx.zeros((97, 32))})
        return tmp_path

    return write


pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")


@pytest.mark.parametrize("field", ["model_file", "auto_map"])
def test_code_in_the_folder_is_never_run(write, field):
    folder = write(**{field: "evil.py" if field == "model_file" else {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="model_file is 'evil.py'" if field == "model_file" else "weights"):
        load_model(folder)
    assert not (folder / "ran").exists()


def test_logits_are_those_of_mlx_lm(tmp_path):
    granite = pytest.importorskip("mlx_lm.models.granitemoe")
    values = {**GRANITE, "eos_token_id": [3, 4], "rope_theta": 123.0}
    original = granite.Model(granite.ModelArgs.from_dict(values))
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_weights(tmp_path, dict(tree_flatten(original.parameters())))
    model, config = load_model(tmp_path)
    tokens = mx.array([[1, 2, 3, 4]])
    np.testing.assert_allclose(np.array(model(tokens)), np.array(original(tokens)), atol=1e-5)
    assert (config.model_type, config.eos_token_ids, config.max_position_embeddings) == ("granitemoe", {3, 4}, 128)
    halves = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(original.parameters())}
    save_weights(tmp_path, halves)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    model, config = load_model(tmp_path)
    types = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert types == {mx.float32 if ON_CPU else mx.bfloat16} and config.eos_token_ids == {3, 4, 5}
    odd = {**values, "eos_token_id": "x"}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match="eos_token_id is 'x', it must be a token id"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logits_scaling": None, "rms_norm_eps": None}, "config.json lacks rms_norm_eps, logits_scaling"),
        ({"rope_parameters": None}, "config.json lacks rope_theta"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "2"}, "can't be built from this config.json: .*'str'"),
        ({"rope_parameters": 7}, "rope_parameters is 7, it must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type is 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor is None, linear needs"),
        ({"quantization": "4 bits"}, "quantization is '4 bits', it must be an object"),
        ({"quantization": {"bits": 4}}, "quantization lacks group_size"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is a GPTQ checkpoint.*try: its unquantized"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is a bitsandbytes checkpoint, which isn't supp"),
        ({"model_type": "opt", "word_embed_proj_dim": 16}, "has no word_embed_proj_dim 16, and mlx_lm has no opt mode"),
        ({"model_type": "minimax", "linear_attn_alpha_factor": 1}, "MiniMax M2, without the linear attention"),
        (
            {"model_type": "olmo", "quantization_config": {"quant_method": "bitnet"}, "d_model": 32},
            "olmo can't be imported: .*try: pip install ai2-olmo",
        ),
        ({"model_type": 3}, "model_type is 3, it must be a string"),
        ({"model_type": "gpt_bigcode"}, "config.json lacks n_embd"),
        ({}, "the weights don't match the configuration: .* is missing .and 20 more"),
    ],
)
def test_errors_name_the_field(write, changes, expected):
    with pytest.raises(CheckpointError, match=expected):
        load_model(write(**changes))


def test_other_formats_are_errors(write):
    folder = write()
    (folder / "model.safetensors").unlink()
    torch = pytest.importorskip("torch")
    torch.save({"model.embed_tokens.weight": torch.zeros(97, 32)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="mlx_lm reads safetensors, not pytorch files .*save_pretrained"):
        load_model(folder)
    assert "reads safetensors" in describe(open_checkpoint(folder)).problem


def test_router_correction_bias_is_an_error(write):
    folder = write(
        model_type="ernie4_5_moe", use_bias=False, moe_intermediate_size=16, moe_num_shared_experts=0, moe_k=2,
        moe_layer_start_index=0, moe_layer_end_index=1, moe_layer_interval=1, moe_num_experts=4, head_dim=8,
    )  # fmt: skip
    name = "model.layers.0.mlp.moe_statics.e_score_correction_bias"
    for value, expected in ((1.0, f"{name} isn't zero"), (0.0, "is missing")):
        save_weights(folder, {name: mx.full((1, 4), value)})
        with pytest.raises(CheckpointError, match=expected):
            load_model(folder)


def run(capsys, *arguments):
    capsys.readouterr()
    code = _run(list(map(str, arguments)))
    return code, *capsys.readouterr()


def test_inspect_tells_whether_a_model_runs(write, capsys):
    code, out, _ = run(capsys, "inspect", write())
    assert code == 0 and "granitemoe, run by mlx_lm: " in out
    code, out, _ = run(capsys, "inspect", write(model_type="gpt_neo"))
    assert code == 0 and "gpt_neo, can't be run: " in out and "run by" not in out
    code, out, _ = run(capsys, "inspect", write(logits_scaling=None), "--json")
    assert code == 0 and json.loads(out)["problem"].endswith("lacks logits_scaling, which mlx_lm's granitemoe needs")
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = write(rope_parameters={**longrope, "original_max_position_embeddings": 64})
    _, _, err = run(capsys, "inspect", folder)
    assert "texts end at 64 tokens: mlx_lm's model ignores rope_parameters beyond" in " ".join(err.split())


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_convert_and_quantize_need_a_model_that_runs(write, tmp_path, capsys, command):
    code, _, err = run(capsys, command, write(), "--out", tmp_path / "out")
    assert code == 1 and "the weights don't match the configuration" in " ".join(err.split())
    code, _, err = run(capsys, command, write(model_type="gpt_neo"), "--out", tmp_path / "out")
    assert code == 1 and "model_type 'gpt_neo'" in err and "try" not in err


@pytest.mark.parametrize(
    "kind", ["os", "base", "cache", "..utils", "granitemoe.ModelArgs", "../granitemoe", "gpt_neo", ""]
)
def test_only_models_of_mlx_lm_are_imported(write, kind):
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=f"neither mlxlm nor mlx_lm has a model for model_type {kind!r}"):
        load_model(write(model_type=kind))
    assert {name for name in set(sys.modules) - before if not name.startswith(("mlx_lm.", "encodings."))} <= {"mlx_lm"}


TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "sliding_window": 16, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}  # fmt: skip
MULTIMODAL = {
    "gemma3": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "gemma3n": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97, "max_position_embeddings": 128, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.0] * 6,
        "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": 4, "intermediate_size": [48] * 6,
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
