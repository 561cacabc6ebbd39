"""`mlxlm inspect`."""

import json

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import save_weights
from mlxlm.checkpoint.huggingface import write
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.config import ModelConfig
from mlxlm.utils.json_files import write_json
from tests.run_command import run
from tests.small_models import arrays_of, random_decoder


def test_inspect(model):
    code, out, err = run("inspect", model)
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and err == ""
    assert shown["layers"] == "2, width 64" and shown["types"].startswith("F16 ")
    assert "4 heads of 16 on 2 key-value heads" in shown["attention"] and "run by mlxlm's own" in shown["family"]
    code, out, _ = run("inspect", model, "--json", "--tensors")
    facts = json.loads(out)
    assert facts["bits_per_weight"] == 16 and facts["quantization"] is None
    assert {"name": "model.norm.weight", "type": "F16", "shape": "64", "bytes": 128} in facts["tensor_list"]


def test_control_characters_in_files_are_not_printed(model):
    values = json.loads((model / "config.json").read_text())
    plan = {"bits": 0, "mode": "affine", "x\x1b[2J": {"bits": "y"}}
    write_json(model / "config.json", {**values, "model_type": "\x1b[31mmamba\nerror", "quantization": plan})
    code, out, _ = run("inspect", model)
    assert code == 0 and "\x1b" not in out and "\\x1b[31mmamba error, can't be run: " in out


def test_the_reason_for_mlx_lm(model):
    values = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", {**values, "model_type": "plamo2"})
    code, out, _ = run("inspect", model)
    assert code == 0 and "plamo2, run by mlx_lm: " in out


def test_equal_layers_are_grouped(model):
    weights = mx.load(str(model / "model.safetensors"))
    mx.eval(weights)
    plan = {"bits": 4, "group_size": 32, "mode": "affine"}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        bits = 8 if "v_proj" in name or "down_proj" in name else 4
        if bits == 8:
            plan[stem] = {"bits": 8, "group_size": 32}
        packed = mx.quantize(weights.pop(name), 32, bits)
        weights |= {f"{stem}.{part}": w for part, w in zip(("weight", "scales", "biases"), packed, strict=True)}
    plan["model.embed_tokens"] = False
    (model / "model.safetensors").unlink()
    save_weights(model, weights)
    values = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", {**values, "quantization": plan})
    code, out, _ = run("inspect", model)
    [line] = [line for line in out.splitlines() if "affine 8 bits" in line]
    assert code == 0 and sorted(line.split("32 ")[1].split(", ")) == [
        "model.layers.*.mlp.down_proj",
        "model.layers.*.self_attn.v_proj",
    ]


def test_experts(tmp_path, tiny_tokenizer):
    config = ModelConfig(
        32, 3, 2, 48, tiny_tokenizer.vocab_size, model_type="glm4_moe", num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=20, router="sigmoid", shared_expert_intermediate_size=20, attention_out_bias=False,
        mlp_layer_types=["dense", "sparse", "sparse"],
    )  # fmt: skip
    weights = {name: lazy_tensor(value) for name, value in arrays_of(random_decoder(config)).items()}
    write(tmp_path, {}, config, weights, tiny_tokenizer)
    _, out, _ = run("inspect", tmp_path)
    line = next(line for line in out.splitlines() if line.startswith("feed-forward"))
    experts = "2 of 6 experts of 20 and a shared one of 20, 48 in 1 of 3 layers"
    assert (
        line
        == f"feed-forward   {experts}, {config.active_parameter_count() / 1000:.1f}k parameters are active, silu, gated"
    )
