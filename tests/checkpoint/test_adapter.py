"""Adapters against PyTorch modules that compute LoRA and DoRA by their papers' formulas, and against mlx_lm's own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_unflatten
from mlxlm.checkpoint import load_model, open_checkpoint, save_weights
from mlxlm.checkpoint.adapter import open_adapter
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert.conversion import convert
from mlxlm.utils.errors import CheckpointError
from tests.small_models import arrays_of, random_decoder, write_folder, write_peft

VOCABULARY = 97
TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (2, 20))
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    **LLAMA, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "head_dim": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "^model.layers.1.mlp.up_proj": 5},
    "alpha_pattern": {"down_proj": 3},
}


def logits(model, tokens=TOKENS):
    return np.array(model(mx.array(tokens)).astype(mx.float32))


def write_config(folder, **values):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))


# PEFT


def peft_scale(config, module):
    """Rank and scale of a module; the patterns of the tests are ends of names, or whole names after ^."""

    def value(default, patterns):
        matches = [v for key, v in patterns.items() if (module == key[1:] if key[0] == "^" else module.endswith(key))]
        return matches[0] if matches else default

    rank = value(config["r"], config.get("rank_pattern", {}))
    alpha = value(config["lora_alpha"], config.get("alpha_pattern", {}))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def adapt(oracle, targets, folder, dtype="float32", **config):
    """Put adapters with random values into a model of transformers, and write them as PEFT does."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    class Adapted(torch.nn.Module):
        def __init__(self, base, a, b, scale, magnitude):
            super().__init__()
            self.base, self.a, self.b, self.scale, self.magnitude = base, a, b, scale, magnitude
            self.weight = base.weight

        def forward(self, x):
            if isinstance(self.base, torch.nn.Embedding):
                return self.base(x) + self.scale * (self.a.T[x] @ self.b.T)
            change = self.scale * (x @ self.a.T @ self.b.T)
            if self.magnitude is None:
                return self.base(x) + change
            is_linear = isinstance(self.base, torch.nn.Linear)
            weight = self.base.weight if is_linear else self.base.weight.T
            bias = 0 if self.base.bias is None else self.base.bias
            norms = (weight + self.scale * self.b @ self.a).norm(dim=1)
            return self.magnitude / norms * (self.base(x) - bias + change) + bias

    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": targets, **config}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    modules = [(name, module) for name, module in oracle.named_modules() if name.rpartition(".")[2] in targets]
    assert modules
    for name, module in modules:
        rank, scale = peft_scale(config, name)
        is_embedding = isinstance(module, torch.nn.Embedding)
        rows, columns = module.weight.shape
        if is_embedding or not isinstance(module, torch.nn.Linear):  # Conv1D has [in, out]
            rows, columns = columns, rows
        a = torch.randn((rank, columns), generator=generator) * 0.2
        b = torch.randn((rows, rank), generator=generator) * 0.2
        magnitude = torch.rand((rows,), generator=generator) + 0.5 if config.get("use_dora") else None
        prefix, kind = f"base_model.model.{name}", "embedding_" if is_embedding else ""
        suffix = "" if is_embedding else ".weight"
        tensors |= {f"{prefix}.lora_{kind}A{suffix}": a, f"{prefix}.lora_{kind}B{suffix}": b}
        if magnitude is not None:
            tensors[f"{prefix}.lora_magnitude_vector"] = magnitude
        parent = oracle.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], Adapted(module, a, b, scale, magnitude))
    write_config(folder, **config)
    if dtype == "bin":
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


PEFT_CASES = {
    "LoRA": ("llama", LLAMA, ALL, {}),
    "rsLoRA": ("llama", LLAMA, ALL, {"use_rslora": True}),
    "DoRA": ("llama", {**LLAMA, "attention_bias": True}, ALL, {"use_dora": True, "lora_alpha": 3}),
    "patterns": ("llama", LLAMA, ALL, {**PATTERNS, "layers_to_transform": [0, 1]}),
    "patterns of rsLoRA": ("llama", LLAMA, ALL, {**PATTERNS, "use_rslora": True}),
    "embedding and head": ("llama", LLAMA, ["embed_tokens", "lm_head"], {}),
    "tied, embedding": ("llama", {**LLAMA, "tie_word_embeddings": True}, ["embed_tokens", "q_proj"], {}),
    "tied, head": ("llama", {**LLAMA, "tie_word_embeddings": True}, ["lm_head"], {}),
    "tied, other": ("llama", {**LLAMA, "tie_word_embeddings": True}, ["v_proj"], {}),
    "bin": ("llama", LLAMA, ["q_proj", "v_proj"], {"dtype": "bin"}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "gpt2 DoRA": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, ["c_attn", "c_proj", "c_fc"], {"use_dora": True}),
    "gpt_neox": ("gpt_neox", NEOX, ["query_key_value", "dense", "dense_h_to_4h"], {}),
    "gpt_neox DoRA": ("gpt_neox", NEOX, ["query_key_value", "dense_4h_to_h"], {"use_dora": True}),
    "phi3": ("phi3", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
             ["qkv_proj", "gate_up_proj"], {"use_dora": True}),
    "cohere": ("cohere", {**LLAMA, "logit_scale": 0.3}, ["q_proj", "k_proj", "v_proj"], {"use_dora": True}),
    "glm": ("glm", {**LLAMA, "head_dim": 16}, ["q_proj", "k_proj", "gate_up_proj"], {}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, ["query_key_value", "dense"], {}),
    "qwen3_moe": ("qwen3_moe", {**LLAMA, **EXPERTS, **ROPE}, ["q_proj", "embed_tokens"], {"use_rslora": True}),
    "qwen3_5": ("qwen3_5_text", LINEAR, ["q_proj", "in_proj_qkv", "in_proj_b", "out_proj"], {"use_dora": True}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
              ["in_proj", "x_proj", "out_proj"], {}),
    "deepseek_v3": ("deepseek_v3", {**LLAMA, **LATENT, **ROPE}, ["kv_b_proj", "q_b_proj"], {"use_dora": True}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4}, ["c_attn", "c_fc"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PEFT_CASES)
def test_peft_computes_what_the_formulas_say(name, tmp_path):
    oracles = pytest.importorskip("tests.transformers_oracle", reason="needs PyTorch and transformers")
    model_type, sizes, targets, config = PEFT_CASES[name]
    oracle = oracles.make_oracle(model_type, sizes, VOCABULARY, "eager")
    oracle.save_pretrained(tmp_path / "model")
    before = oracles.logits_of(oracle, TOKENS)
    adapt(oracle, targets, tmp_path / "adapter", **config)
    wanted = oracles.logits_of(oracle, TOKENS)
    found = logits(load_model(tmp_path / "model", tmp_path / "adapter")[0])
    assert np.abs(wanted - before).max() > 0.2 * wanted.std()
    tolerance = 2e-3 if model_type == "gpt_bigcode" else 5e-4
    assert np.abs(found - wanted).max() < tolerance * wanted.std()


@pytest.mark.parametrize("name", ["deepseek_v3", "mamba", "qwen3_moe"])
def test_convert_merges_adapters_of_peft(name, tmp_path):
    oracles = pytest.importorskip("tests.transformers_oracle", reason="needs PyTorch and transformers")
    model_type, sizes, targets, config = PEFT_CASES[name]
    oracle = oracles.make_oracle(model_type, sizes, VOCABULARY, "eager")
    oracle.save_pretrained(tmp_path / "model")
    adapt(oracle, targets, tmp_path / "adapter", **config)
    convert(tmp_path / "model", tmp_path / "out", adapter=tmp_path / "adapter")
    wanted = oracles.logits_of(oracle, TOKENS)
    assert np.abs(logits(load_model(tmp_path / "out")[0]) - wanted).max() < 5e-4 * wanted.std()


# mlx_lm


@pytest.fixture
def write_mlx_lm(tmp_path):
    """`write_mlx_lm(values, num_layers, keys, kind, quantize)`: a model and an adapter of mlx_lm, and its logits."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
    tuner = pytest.importorskip("mlx_lm.tuner.utils")

    def write(values, num_layers=1, keys=None, kind="lora", quantize=False):
        folder, adapter = tmp_path / "model", tmp_path / "adapter"
        model_class, args_class = utils._get_classes(values)
        model = model_class(args_class.from_dict(values))
        randomize(model)
        if quantize:
            nn.quantize(model, group_size=32, bits=4)
            values = {**values, "quantization": {"group_size": 32, "bits": 4}}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        save_weights(folder, dict(tree_flatten(model.parameters())))
        parameters = {"rank": 3, "scale": 1.7, "dropout": 0.0, **({"keys": keys} if keys else {})}
        if kind == "full":
            model.freeze()
            for layer in model.layers[-num_layers:]:
                layer.unfreeze()
            randomize(model, 7)
        else:
            tuner.linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
            model.freeze()
            model.apply_to_modules(lambda name, module: module.unfreeze(keys=["lora_a", "lora_b", "m"], strict=False))
            randomize(model, 7)
        trained = tree_flatten(model.trainable_parameters())
        write_config(adapter, fine_tune_type=kind, num_layers=num_layers, lora_parameters=parameters, model="org/other")
        mx.save_safetensors(str(adapter / "adapters.safetensors"), dict(trained))
        model.eval()
        plain, _ = utils.load_model(folder)
        loaded = tuner.load_adapters(plain, str(adapter))
        loaded.eval()
        assert np.abs(logits(loaded) - logits(model)).max() < 1e-5
        return folder, adapter, logits(model)

    def randomize(model, seed=0):
        mx.random.seed(seed)
        changed = [
            (name, mx.random.normal(value.shape) * 0.2 + (value.ndim == 1)) for name, value in
            tree_flatten(model.trainable_parameters())
        ]  # fmt: skip
        model.update(tree_unflatten(changed))

    return write


LLAMA_VALUES = {
    **LLAMA, "model_type": "llama", "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2_VALUES = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64,
    "layer_norm_epsilon": 1e-5, "vocab_size": VOCABULARY,
}  # fmt: skip
PHI3_VALUES = {**LLAMA_VALUES, "model_type": "phi3", "tie_word_embeddings": False}
QWEN3_MOE_VALUES = {
    **LLAMA_VALUES, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE_VALUES = {
    **LLAMA_VALUES, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 1.0,
    "attention_multiplier": 0.3, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_bias": False,
    "rope_theta": 123.0, "intermediate_size": 64,
}  # fmt: skip
QWEN3_5_VALUES = {
    "model_type": "qwen3_5",
    "text_config": {**LINEAR, "model_type": "qwen3_5_text", "vocab_size": VOCABULARY},
}
MLX_LM_CASES = {
    "LoRA": (LLAMA_VALUES, {}),
    "LoRA of all layers": (LLAMA_VALUES, {"num_layers": 2, "keys": ["self_attn.q_proj", "mlp.down_proj"]}),
    "LoRA of the embedding": (LLAMA_VALUES, {"keys": ["model.embed_tokens", "self_attn.v_proj"]}),
    "DoRA": (LLAMA_VALUES, {"kind": "dora"}),
    "DoRA of the embedding": (LLAMA_VALUES, {"kind": "dora", "keys": ["model.embed_tokens"]}),
    "full": (LLAMA_VALUES, {"kind": "full"}),
    "gpt2": (GPT2_VALUES, {}),
    "gpt2 full": (GPT2_VALUES, {"kind": "full"}),
    "phi3": (PHI3_VALUES, {"kind": "dora", "keys": ["self_attn.qkv_proj", "mlp.gate_up_proj"]}),
    "phi3 full": (PHI3_VALUES, {"kind": "full"}),
    "qwen3_5": (QWEN3_5_VALUES, {"num_layers": 2}),
    "qwen3_5 full": (QWEN3_5_VALUES, {"num_layers": 2, "kind": "full"}),
    "mixture": (QWEN3_MOE_VALUES, {"num_layers": 2}),
    "mixture, DoRA": (QWEN3_MOE_VALUES, {"kind": "dora", "keys": ["self_attn.q_proj", "mlp.gate"]}),
    "mixture, full": (QWEN3_MOE_VALUES, {"kind": "full"}),
    "mixture, tied embedding": (GRANITE_VALUES, {"keys": ["model.embed_tokens"]}),
}


@pytest.mark.parametrize("name", MLX_LM_CASES)
def test_adapters_of_mlx_lm_compute_what_mlx_lm_does(name, write_mlx_lm):
    values, settings = MLX_LM_CASES[name]
    folder, adapter, wanted = write_mlx_lm(values, **settings)
    before, found = (logits(load_model(folder, path)[0]) for path in (None, adapter))
    assert np.abs(wanted - before).max() > 0.1 * wanted.std()
    assert np.abs(found - wanted).max() < 1e-4 * wanted.std()


@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4, "mode": "affine"}])
@pytest.mark.parametrize(("values", "count"), [(LLAMA_VALUES, 2), (QWEN3_MOE_VALUES, 5)])
def test_only_what_changes_is_dequantized(values, count, quantization, write_mlx_lm):
    values = {**values, "intermediate_size": 64, "moe_intermediate_size": 32}
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj", "mlp.gate"]
    folder, adapter, wanted = write_mlx_lm(values, keys=keys, quantize=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] |= {"model.layers.1.self_attn.q_proj": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=f"{count} quantized matrices are dequantized, because .*adapter changes them"):
        checkpoint = open_checkpoint(folder, adapter)
        model = load_checkpoint(checkpoint)[0]
    assert np.abs(logits(model) - wanted).max() < 1e-3 * wanted.std()


# Both


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def halves():
    """The two halves of an adapter of one matrix of `model_dir`."""
    mx.random.seed(3)
    shapes = {f"{QUERY}.lora_A.weight": (2, 32), f"{QUERY}.lora_B.weight": (32, 2)}
    return {name: mx.random.normal(shape) for name, shape in shapes.items()}


def change_of(halves, scale=2.0):
    return scale * (halves[f"{QUERY}.lora_B.weight"] @ halves[f"{QUERY}.lora_A.weight"])


def test_weights_keep_their_dtype_and_are_rounded_once(model_dir, tmp_path, halves):
    weights = {name: value.astype(mx.bfloat16) for name, value in arrays_of(load_model(model_dir)[0]).items()}
    save_weights(model_dir, weights)
    adapter = write_peft(tmp_path / "adapter", {name: half.astype(mx.float16) for name, half in halves.items()})
    tensors = open_checkpoint(model_dir, adapter).tensors
    name = f"{QUERY}.weight"
    tensor, plain = tensors[name], open_checkpoint(model_dir).tensors
    exact = {half: value.astype(mx.float16).astype(mx.float32) for half, value in halves.items()}
    expected = (weights[name].astype(mx.float32) + change_of(exact)).astype(mx.bfloat16)
    assert (tensor.dtype, tensor.stored_dtype, tensor.nbytes) == (mx.bfloat16, "BF16", plain[name].nbytes)
    assert mx.array_equal(tensor.read(), expected).item() and tensor.read().dtype == mx.bfloat16
    for other in set(tensors) - {name}:
        assert mx.array_equal(tensors[other].read(), plain[other].read()).item()


def test_quantized_layers_beside_the_changed_one_stay_quantized_on_a_gpu(tmp_path, tiny_config, halves, monkeypatch):
    monkeypatch.setattr("mlxlm.checkpoint.load.ON_CPU", False)
    decoder = random_decoder(tiny_config)
    nn.quantize(decoder, group_size=32, bits=4)
    config = tiny_config.with_changes(quantization={"group_size": 32, "bits": 4})
    folder = write_folder(tmp_path / "model", decoder, config)
    adapter = write_peft(tmp_path / "adapter", halves)
    with pytest.warns(UserWarning, match="1 quantized matrix is dequantized, because"):
        model = load_model(folder, adapter)[0]
    projections = [(name, module) for name, module in model.named_modules() if name.endswith("_proj")]
    assert [name for name, module in projections if not isinstance(module, nn.QuantizedLinear)] == [QUERY]
    layer = decoder.layers[1].self_attn.q_proj
    plain = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4)
    assert mx.allclose(model.layers[1].self_attn.q_proj.weight, plain + change_of(halves), atol=1e-5).item()


@pytest.mark.parametrize("is_tied", [True, False])
def test_fully_trained_modules_of_peft_replace_those_of_the_model(is_tied, tmp_path, tiny_config, halves):
    config = tiny_config.with_changes(tie_word_embeddings=is_tied)
    folder = write_folder(tmp_path / "model", random_decoder(config), config)
    head, norm = mx.random.normal((300, 32)), mx.random.normal((32,))
    saved = {"lm_head.weight": head, "model.norm.modules_to_save.weight": norm, f"{QUERY}.base_layer.weight": head[:32]}
    adapter = write_peft(tmp_path / "adapter", {**saved, **halves}, modules_to_save=["lm_head", "norm"])
    plain, changed = (open_checkpoint(folder, path) for path in (None, adapter))
    read = {name: tensor.read() for name, tensor in changed.tensors.items()}
    assert mx.array_equal(read["lm_head.weight"], head).item() and not changed.config.tie_word_embeddings
    assert mx.array_equal(read["model.norm.weight"], norm).item()
    embedding = "model.embed_tokens.weight"
    assert mx.array_equal(read[embedding], plain.tensors[embedding].read()).item()
    assert mx.allclose(read[f"{QUERY}.weight"], head[:32] + change_of(halves), atol=1e-5).item()
    load_checkpoint(changed)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_adapters_of_a_model_with_images_fit_its_language_model(prefix, model_dir, tmp_path, halves):
    renamed = {name.replace("model.", prefix): half for name, half in halves.items()}
    found, wanted = (
        logits(load_model(model_dir, write_peft(tmp_path / "adapter", tensors))[0]) for tensors in (renamed, halves)
    )
    np.testing.assert_array_equal(found, wanted)


def test_peft_adapts_single_experts_of_a_mixture(tmp_path):
    oracles = pytest.importorskip("tests.transformers_oracle", reason="needs PyTorch and transformers")
    folder, name = tmp_path / "model", "model.layers.1.mlp.experts.2.up_proj"
    oracle = oracles.make_oracle("qwen3_moe", {**LLAMA, **EXPERTS, **ROPE}, VOCABULARY, "eager")
    oracle.save_pretrained(folder)
    a, b = mx.random.normal((2, 32)), mx.random.normal((16, 2))
    adapter = write_peft(tmp_path / "adapter", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    before, found = (logits(load_model(folder, path)[0]) for path in (None, adapter))
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    save_weights(folder, {**weights, f"{name}.weight": weights[f"{name}.weight"] + 2 * (b @ a)})
    wanted = logits(load_model(folder)[0])
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(wanted - before).max() > 0.1


def test_an_adapter_of_a_gguf_file(model_dir, tmp_path, halves):
    """Its queries are stored in another order."""
    convert(model_dir, tmp_path / "model.gguf", outtype="F32", verify_output=False)
    adapter = write_peft(tmp_path / "adapter", halves)
    found, wanted = (logits(load_model(path, adapter)[0]) for path in (tmp_path / "model.gguf", model_dir))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(wanted - logits(load_model(model_dir)[0])).max() > 1e-3


def test_a_tied_mixture_refuses_an_adapter_of_one_of_both(write_mlx_lm, tmp_path):
    folder, _, _ = write_mlx_lm(GRANITE_VALUES)
    halves = {"lora_embedding_A": mx.ones((2, VOCABULARY)), "lora_embedding_B": mx.ones((32, 2))}
    adapter = write_peft(tmp_path / "peft", {f"model.embed_tokens.{name}": half for name, half in halves.items()})
    with pytest.raises(CheckpointError, match="changes model.embed_tokens, and the embedding of this model"):
        load_model(folder, adapter)


A, B = (f"{QUERY}.lora_{half}.weight" for half in "AB")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"peft_type": "ADALORA"}, "adapter_config.json: peft_type 'ADALORA' is not supported .*type LORA"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING' is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported .*bias none"),
        ({"use_rslora": "no"}, "use_rslora 'no' is not supported .*true or false"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported .*path_initial_model"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters .* is not supported .*merge_and_unload"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices .* is not supported"),
        ({"r": 0}, "r is 0, it must be a positive integer"),
        ({"r": True}, "r is True, it must be a positive integer"),
        ({"r": 3}, rf"{A} is \[2, 32\], and the rank is 3"),
        ({"lora_alpha": None}, "lora_alpha is None, it must be a number"),
        ({"lora_alpha": 1e39}, r"lora_alpha is 1e\+39, it must be a number"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern.q_proj is '2', it must be a positive integer"),
        ({"rank_pattern": [2]}, r"rank_pattern is \[2\], it must be an object"),
        ({"rank_pattern": {"q_proj": 1}}, "and the rank is 1"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "alpha_pattern has the regular expression .* not supported .*names of"),
        ({"use_dora": True}, rf"the magnitude of {QUERY}.lora_[AB].weight is missing"),
    ],
)
def test_settings_that_are_wrong_or_not_supported(config, expected, model_dir, tmp_path, halves):
    adapter = write_peft(tmp_path / "adapter", halves, **config)
    with pytest.raises(CheckpointError, match=expected) as error:
        open_checkpoint(model_dir, adapter)
    assert str(adapter) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({B: None}, f"the other half of {A} is missing"),
        ({B: mx.zeros((31, 2))}, rf"{A} is for shape \[31, 32\], the model has \[32, 32\]"),
        ({B: mx.zeros((32, 3))}, rf"{B} is \[32, 3\], and the rank is 2"),
        ({A: mx.zeros((2, 32, 1))}, rf"{A} is \[2, 32, 1\], and the rank is 2"),
        ({A: mx.zeros((2, 32), mx.int32)}, f"{A} is of type I32, not floating-point"),
        (
            {f"{QUERY}.lora_magnitude_vector": mx.ones(32)},
            "lora_magnitude_vector is of DoRA, adapter_config.json says",
        ),
        ({f"{QUERY}.ia3_l": mx.ones(32)}, f"{QUERY}.ia3_l is for {QUERY}, which the model doesn't have"),
        ({"model.norm.weight": mx.ones(31)}, r"model.norm.weight is for shape \[31\], the model has \[32\]"),
        (
            {A.replace("1", "7"): mx.ones((2, 32)), B.replace("1", "7"): mx.ones((32, 2))},
            "lora_A.weight is for model.layers.7.self_attn.q_proj, which the model doesn't have",
        ),
        (
            {A.replace("model.", ""): mx.ones((2, 32)), B.replace("model.", ""): mx.ones((32, 2))},
            "a module occurs twice, with and without a prefix",
        ),
    ],
)
def test_tensors_that_do_not_fit(changes, expected, model_dir, tmp_path, halves):
    tensors = {name: value for name, value in {**halves, **changes}.items() if value is not None}
    adapter = write_peft(tmp_path / "adapter", tensors)
    with pytest.raises(CheckpointError, match=expected) as error:
        open_checkpoint(model_dir, adapter)
    assert str(adapter / "adapter_model.safetensors") in str(error.value)


def test_the_parts_of_a_fused_module_occur_once(tmp_path, tiny_config, halves):
    config = tiny_config.with_changes(model_type="phi3", num_key_value_heads=4, tie_word_embeddings=False)
    folder = write_folder(tmp_path / "model", random_decoder(config), config)
    fused = QUERY.replace("q_proj", "qkv_proj")
    tensors = {**halves, f"{fused}.lora_A.weight": mx.ones((2, 32)), f"{fused}.lora_B.weight": mx.ones((96, 2))}
    with pytest.raises(CheckpointError, match="a module occurs twice, fused with others and alone"):
        open_checkpoint(folder, write_peft(tmp_path / "adapter", tensors))
    short = {f"{fused}.lora_A.weight": mx.ones((2, 32)), f"{fused}.lora_B.weight": mx.ones((95, 2))}
    with pytest.raises(CheckpointError, match=r"qkv_proj.lora_B is \[95, 2\], config.json says 96 rows"):
        open_checkpoint(folder, write_peft(tmp_path / "adapter", short))


def test_a_pattern_is_not_the_beginning_of_a_name(model_dir, tmp_path, halves):
    adapter = write_peft(tmp_path / "adapter", halves, rank_pattern={"^model.layers.1": 7, "j": 7})
    assert open_adapter(adapter).updates[QUERY].scale == 2


def test_dora_has_a_magnitude_for_each_row(model_dir, tmp_path, halves):
    tensors = {**halves, f"{QUERY}.lora_magnitude_vector": mx.ones(31)}
    with pytest.raises(CheckpointError, match=rf"the magnitude next to {A} is for shape \[31\], the model has \[32\]"):
        open_checkpoint(model_dir, write_peft(tmp_path / "adapter", tensors, use_dora=True))


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({}, {}, "adapter_config.json has neither peft_type nor fine_tune_type"),
        ({"fine_tune_type": "prompt"}, {}, "fine_tune_type 'prompt' is not supported .*lora, dora or full"),
        (
            {"lora_parameters": {"rank": 2, "alpha": 16}},
            {},
            "lora_parameters is .*must have a positive rank and",
        ),
        ({"fine_tune_type": "lora"}, {}, "lora_parameters is None"),
        ({"lora_parameters": {"rank": 2, "scale": float("nan")}}, {}, "lora_parameters is .*must have a positive rank"),
        ({"lora_parameters": {"rank": 2, "scale": 1}}, {"x.lora_a": (3, 2)}, "the other half of x.lora_a is missing"),
        ({"lora_parameters": {"rank": 2, "scale": 1}}, {"x.weight": (3, 2)}, "x.weight is not part of a lora adapter"),
        (
            {"lora_parameters": {"rank": 2, "scale": 1}},
            {"x.lora_a": (2, 32), "x.lora_b": (2, 32)},
            r"x.lora_a is \[2, 32\], and the rank is 2",
        ),
        (
            {"lora_parameters": {"rank": 2, "scale": 1}},
            {"x.lora_a": (32, 2), "x.lora_b": (2, 32)},
            "x.lora_a is for x, which the model doesn't have",
        ),
        ({"fine_tune_type": "full"}, {"y.weight": (2,)}, "y.weight is for y, which the model doesn't have"),
    ],
)
def test_adapters_of_mlx_lm_that_are_wrong(config, tensors, expected, model_dir, tmp_path):
    adapter = tmp_path / "adapter"
    write_config(adapter, **config)
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: mx.zeros(s) for name, s in tensors.items()})
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(model_dir, adapter)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match="there is no adapter '.*nothing' .*a folder that has"):
        open_adapter(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="adapter_config.json does not exist"):
        open_adapter(tmp_path)
    write_config(tmp_path, peft_type="LORA", r=2, lora_alpha=2)
    with pytest.raises(CheckpointError, match="cannot read .*adapter_model.safetensors"):
        open_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="adapter_config.json is a file"):
        open_adapter(tmp_path / "adapter_config.json")


def test_an_adapter_of_the_hub(tmp_path, halves, monkeypatch):
    patterns = []

    def snapshot_download(repository, allow_patterns, **_):
        patterns.append(allow_patterns)
        return str(write_peft(tmp_path / repository.replace("/", "-"), halves))

    monkeypatch.setattr("mlxlm.checkpoint.hub.is_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    for id in ("owner/adapter", "https://huggingface.co/owner/adapter"):
        assert list(open_adapter(id).updates) == [QUERY]
    assert patterns == [["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"]] * 2
