"""Every model type of transformers and of mlx_lm: who runs it, whether texts share a batch, and how exact it is.

python benchmarks/families.py [MODEL_TYPE ...]

A tiny random model of each type is saved by transformers and loaded by mlxlm. Its logits are compared, of a whole text
and of its last tokens one by one, in standard deviations of transformers' logits. Types that only mlx_lm has are built
from the fields of its class, without a comparison. A type without a tiny model is classified
by its name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from common import report

from mlxlm.backend.mlx import mx
from mlxlm.cache import make_cache
from mlxlm.cache.mlx_lm_caches import can_batch
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.mlx_lm.model import build_model
from mlxlm.families import FAMILIES
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model import Decoder
from mlxlm.utils.errors import MlxlmError

# The decoder runs it; mlx_lm's class does, and texts share batches or not; mlx_lm has a class, but no tiny model could
# be made; it is refused; an error that isn't mlxlm's was raised.
NATIVE, BATCHED, ALONE, UNTRIED, REFUSED, FAILS = KINDS = (
    "native", "in the batch", "one by one", "by name", "refused", "fails",
)  # fmt: skip
VOCABULARY, LENGTH = 97, 40
TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (2, LENGTH))
_SET = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # by `make_oracle`
_LAYERS = 4
# Fields of a configuration that get another value than the default, if the class has them.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": _LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 128,
    "sliding_window": 12, "rms_norm_eps": 1e-3, "rope_theta": 123.0, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # older names
    "n_embd": 64, "n_layer": _LAYERS, "n_head": 4, "n_positions": 128, "n_inner": 96, "n_ctx": 128, "d_model": 64,
    "n_layers": _LAYERS, "n_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_seq_len": 128, "seq_length": 128,
    "rotary_dim": 8, "ffn_hidden_size": 96, "num_layers": _LAYERS, "layer_norm_eps": 1e-3, "layer_norm_epsilon": 1e-3,
    "norm_eps": 1e-3, "layernorm_epsilon": 1e-3, "mixer_rms_eps": 1e-3, "norm_epsilon": 1e-3,
    "attention_bias": False, "mlp_bias": False, "num_heads": 4,
    # mixtures
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "expert_ffn_hidden_size": 32, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "moe_layer_end_index": _LAYERS - 1, "intermediate_size_mlp": 40, "n_group": 1, "topk_group": 1,
    "zero_expert_num": 2, "norm_topk_prob": True,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 8,
    "qk_head_dim": 20, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 64,
    # recurrent layers
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "mamba_d_ssm": 128, "mamba_dt_rank": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
    "state_size": 8, "time_step_rank": 4, "n_groups": 1, "chunk_size": 16, "lru_width": 64, "block_size": 16,
    "conv_L_cache": 3, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False,
    "full_attention_interval": 2, "linear_conv_kernel_dim": 4, "conv_kernel": 4, "layer_group_size": 2,
    "group_norm_size": 2, "conv_window": 2, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8, "conv_bias": False,
    # what only classes of mlx_lm have
    "mlp_only_layers": [], "decoder_sparse_step": 1, "routed_scaling_factor": 1.0, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0, "hidden_dim": 96,
    "num_kv_reuse_layers": 1, "num_kv_heads": 2, "n_kv_heads": 2, "sliding_window_layers": [1],
    "use_mixed_mlp_moe": True, "num_shared_expert": 1, "use_cla": False, "cla_share_factor": 1,
    "num_attention_groups": 2, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
    "num_transformer_layers": 4,
    "model_dim": 64, "ffn_dim_divisor": 8, "num_query_heads": 4, "ffn_multipliers": 1.0, "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    # Gemma 3n and 4
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4,
    "altup_num_inputs": 2, "num_kv_shared_layers": 0, "global_head_dim": 16, "num_global_key_value_heads": None,
    "activation_sparsity_pattern": None,
}  # fmt: skip
# Further values of one type: sizes that depend on each other.
BY_TYPE: dict[str, dict[str, Any]] = {
    "apertus": {"hidden_act": "xielu"},
    **dict.fromkeys(("falcon_mamba", "mamba"), {"layer_norm_epsilon": 1e-5}),
    "gemma3n_text": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), {"tie_word_embeddings": True}),
    "gpt_oss": {"attention_bias": True},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "mamba_proj_bias": False,
        "use_bias": False,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gptj": {"n_inner": None},
    "hunyuan": {"use_qk_norm": True},
    "jamba": {"num_experts": 1, "num_local_experts": 1, "attn_layer_offset": 1, "attn_layer_period": 2},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": True}),
    "longcat_flash": {"zero_expert_num": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "layer_norm_epsilon": 1e-5},
    "mimo_v2_flash": {"head_dim": 24},
    "minicpm3": {"v_head_dim": 16},
    "minimax_m3_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5}
    },
    "nanochat": {"rms_norm_eps": 1e-5},
    "olmo_hybrid": {"linear_num_value_heads": 2},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0, "mrope_section": [2, 3, 3]}},
    ),
    "recurrent_gemma": {"num_key_value_heads": 1, "tie_word_embeddings": True},
}


@dataclass
class Row:
    """One model type.

    Attributes:
        model_type: Hugging Face's.
        how: One of KINDS.
        error: Largest difference of logits, in their standard deviations; None if it isn't known.
        note: Why it is refused or isn't compared.
    """

    model_type: str
    how: str
    error: float | None = None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all if there is none")
    types = parser.parse_args().types
    rows = []
    for model_type in types or model_types():
        rows.append(classify(model_type))
        print(".", end="", flush=True, file=sys.stderr)
    rows.sort(key=lambda row: (KINDS.index(row.how), row.model_type))
    table = [(row.model_type, describe(row)) for row in rows]
    counts = dict(Counter(row.how for row in rows))
    report(
        f"Model types: {counts}", table, {"benchmark": "families", "counts": counts, "types": list(map(asdict, rows))}
    )


def describe(row: Row) -> str:
    """A row of the table, after the model type."""
    error = "" if row.error is None else f"{row.error:.1e}"
    return f"{row.how:<13} {error:<8} {row.note}".rstrip()


def model_types() -> list[str]:
    """Every model type of transformers' causal language models and of mlx_lm."""
    return sorted({*of_transformers(), *of_mlx_lm()})


def of_transformers() -> dict[str, str]:
    """Model types of transformers that complete a text, with the name of the class."""
    from transformers.models.auto import modeling_auto

    with_images, ours = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, {*of_mlx_lm(), *FAMILIES}
    known = {name: value for name, value in with_images.items() if name in ours}
    return {**known, **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def of_mlx_lm() -> dict[str, str]:
    """Model types of mlx_lm, with the name of the module."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    models = {name for name in modules if "class ModelArgs" in _source(name)}
    return {**{name: name for name in models}, **MODEL_REMAPPING}


def _source(name: str) -> str:
    import mlx_lm.models

    return (Path(mlx_lm.models.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")


def classify(model_type: str) -> Row:
    """Load a tiny model of a type and compare its logits."""
    if model_type not in of_transformers():
        return _of_mlx_lm_alone(model_type)
    if model_type not in FAMILIES and _without_model(model_type):
        return Row(model_type, REFUSED, note="neither mlxlm nor mlx_lm has a model")
    with tempfile.TemporaryDirectory() as folder:
        try:
            wanted = save_tiny(model_type, Path(folder))
        except Exception as error:  # whatever transformers raises for a configuration that isn't one
            return Row(model_type, NATIVE if model_type in FAMILIES else UNTRIED, note=f"no tiny model: {_line(error)}")
        try:
            model, config = load_model(folder)
            how = NATIVE if isinstance(model, Decoder) else BATCHED if can_batch(model) else ALONE
            return Row(model_type, how, difference(model, wanted, config.max_position_embeddings))
        except Exception as error:  # an error of mlxlm, or a fault
            return Row(
                model_type,
                REFUSED if isinstance(error, MlxlmError) else FAILS,
                note=_line(error).replace(f"{folder}: ", ""),
            )


def _without_model(model_type: str) -> bool:
    """Whether neither program has a class, also not for the language model of one with images."""
    return not {model_type, model_type.removesuffix("_text")} & {*of_mlx_lm(), *FAMILIES}


def save_tiny(model_type: str, folder: Path) -> np.ndarray:
    """Save a tiny random model of transformers; return its logits of TOKENS."""
    import transformers

    from tests.transformers_oracle import logits_of, make_oracle

    default = transformers.AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in _small(default).items() if name not in _SET}
    model = make_oracle(model_type, sizes, VOCABULARY, "eager")
    model.save_pretrained(folder)
    return logits_of(model, TOKENS)


def _small(config: Any) -> dict[str, Any]:
    """The fields of SMALL that a configuration of transformers has, also inside of those of its parts."""
    fields = {*config.to_dict(), *config.attribute_map}
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "layer_types" in fields or not fields >= {"rope_theta"}:
        values.pop("rope_theta", None)
    if "kv_lora_rank" in fields:  # no shared heads
        values |= {"num_key_value_heads": values["num_attention_heads"], "head_dim": 8}
    parts = {name: getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None}
    return values | BY_TYPE.get(config.model_type, {}) | {name: _small(part) for name, part in parts.items()}


def difference(model: Any, wanted: np.ndarray, limit: int) -> float:
    """Largest difference of logits: of a text of at most `limit` tokens, and of its tokens one by one with a cache."""
    tokens, wanted = TOKENS[:, :limit], wanted[:, :limit]
    whole = np.array(model(mx.array(tokens)).astype(mx.float32))
    step, caches = DecodeStep(model), make_cache(model)
    singles = [step(mx.array(tokens[:1, i : i + 1]), caches) for i in range(tokens.shape[1])]
    found = np.array(mx.stack(singles, axis=1).astype(mx.float32))
    errors = np.abs(whole - wanted).max(), np.abs(found - wanted[:1]).max()
    return float(max(errors) / wanted.std())


def _of_mlx_lm_alone(model_type: str) -> Row:
    """Build a tiny model of a class that only mlx_lm has."""
    name = of_mlx_lm()[model_type]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    except (Exception, SystemExit) as error:
        return Row(model_type, REFUSED, note=_line(error))
    fields = inspect.signature(arguments).parameters
    values = {field: value for field, value in SMALL.items() if field in fields}
    try:
        values = {"model_type": model_type, **values, **BY_TYPE.get(model_type, {})}
        if "text_config" in fields:
            values["text_config"] = {**SMALL, **values}
        model, _ = build_model(values)
        return Row(model_type, BATCHED if can_batch(model) else ALONE, note="mlx_lm's class alone, not compared")
    except Exception as error:
        return Row(model_type, UNTRIED, note=f"no tiny model: {_line(error)}")


def _line(error: BaseException) -> str:
    text = " ".join((getattr(error, "message", None) or str(error) or type(error).__name__).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    main()
