"""A model's configuration out of a GGUF file: llama.cpp's keys to Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from mlxlm.checkpoint.gguf.reader import Array, Header
from mlxlm.checkpoint.gguf.rope import FACTORS, LONG, SHORT, llama3_scaling
from mlxlm.checkpoint.gguf.tensors import read_tensor
from mlxlm.config.rope_scaling import attention_factor
from mlxlm.families import FAMILIES
from mlxlm.utils.errors import CheckpointError

_ORIGINAL_CONTEXT = 8192  # of Llama 3, whose GGUF files don't say it
_MOST_FREQUENCIES = 4096  # of a head, which has 128 dimensions as a rule
_NUMBER = (int, float)


class MetadataReader:
    """Typed look-ups in the metadata of one file. `short` names are below the architecture's own prefix."""

    def __init__(self, header: Header):
        self.header = header
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, "text", default)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        return self._get(key, bool, "true or false", default) if key in self.header.metadata else default

    def id(self, key: str) -> int | None:
        """A token id, where there is one; llama.cpp's converters write 2³² - 1 for none."""
        value = self._get(key, int, "a whole number", -1)
        return value if 0 <= value < 2**31 else None

    def count(self, short: str, default: int | None = None) -> int:
        """A whole number, or an array that has the same one for each layer."""
        key = f"{self.architecture}.{short}"
        value = self.header.metadata.get(key)
        if isinstance(value, Array):
            value = self._uniform(key, value)
        else:
            value = self._get(key, int, "a whole number", default)
        if not 0 <= value < 2**31:
            raise self.error(f"{key} is {value}, it must be a size")
        return value

    def number(self, short: str, default: float | None = None) -> float:
        """A float, with no more digits than float32 has: 1e-05 and not 9.999999747378752e-06."""
        value = self._get(f"{self.architecture}.{short}", _NUMBER, "a number", default)
        return _decimal(value)

    def has(self, short: str) -> bool:
        return f"{self.architecture}.{short}" in self.header.metadata

    def error(self, message: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.header.path}: {message}", hint)

    def _get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise self.error(f"the metadata lacks {key}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key} must be {what}")
        return value

    def _uniform(self, key: str, array: Array) -> int:
        if array.holds_strings or not 0 < array.count <= len(self.header.tensors):
            raise self.error(f"{key} must be a whole number")
        values = array.read()
        if any(value != values[0] for value in values):
            raise self.error(f"{key} differs between the layers, which this decoder can't do")
        if type(values[0]) is not int:
            raise self.error(f"{key} must be a whole number")
        return values[0]


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32."""
    return float(str(np.float32(value)))


def get_architecture(keys: MetadataReader) -> Architecture:
    architecture = ARCHITECTURES.get(keys.architecture)
    if architecture is None:
        hint = "one of " + ", ".join(ARCHITECTURES)
        raise keys.error(f"general.architecture is {keys.architecture!r}, which this decoder doesn't have", hint)
    if keys.count("expert_count", 0):
        raise keys.error("this model is a mixture of experts, which this decoder doesn't have")
    return architecture


def read_hf_config(keys: MetadataReader, architecture: Architecture) -> dict[str, Any]:
    """Hugging Face's configuration of the model in `keys.header`.

    GGUF has no `model_type`. A "llama" with a sliding window is taken for Mistral, any other for Llama: without a
    window the two compute the same.
    """
    tensors = keys.header.tensors
    model_type = architecture.families[0]
    if architecture.name == "llama" and keys.count("attention.sliding_window", 0):
        model_type = "mistral"
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise keys.error("there is no matrix token_embd.weight")
    layers, hidden = keys.count("block_count"), keys.count("embedding_length")
    heads = keys.count("attention.head_count")
    if not 0 < layers <= len(tensors):
        raise keys.error(f"{keys.architecture}.block_count is {layers}, there are {len(tensors)} tensors")
    if embedding.shape[1] != hidden or not heads:
        raise keys.error(
            f"token_embd.weight is {list(embedding.shape)}, {keys.architecture}.embedding_length says {hidden}"
            f" and attention.head_count {heads}"
        )
    values = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number(f"attention.layer_norm{'_rms' * (architecture.norm == 'rms')}_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_tokens(keys),
    }
    if architecture.free_head_dim:
        values["head_dim"] = keys.count("attention.key_length", hidden // heads)
        if keys.count("attention.value_length", hidden // heads) != values["head_dim"]:
            raise keys.error(f"{keys.architecture}.attention.value_length differs from key_length")
    family = FAMILIES[model_type]
    values = {family.hf_names(name)[0]: value for name, value in values.items() if family.hf_names(name)}
    if architecture.name not in ("gpt2", "bloom"):
        values |= _rope(keys, keys.count("attention.key_length", hidden // heads))
    own = _OWN.get(model_type)
    return {"model_type": model_type, **values, **(own(keys) if own else {})}


def _tokens(keys: MetadataReader) -> dict[str, Any]:
    ids = {role: keys.id(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding", "eot", "eom")}
    ends = sorted({ids[role] for role in ("eos", "eot", "eom")} - {None, ids["eos"]})
    ends = [ids["eos"], *ends] if ids["eos"] is not None else ends
    values = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    return {**values, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _rope(keys: MetadataReader, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10_000.0)
    turning = keys.count("rope.dimension_count", head_dim)
    parameters = {"rope_theta": theta, "partial_rotary_factor": turning / max(head_dim, 1)}
    return {"rope_parameters": {"rope_type": "default", **parameters, **(_scaling(keys, theta) or {})}}


def _scaling(keys: MetadataReader, theta: float) -> dict[str, Any] | None:
    tensors = keys.header.tensors
    if FACTORS in tensors:
        return _llama3(keys, theta)
    if LONG in tensors or SHORT in tensors:
        return _longrope(keys)
    kind = keys.text(f"{keys.architecture}.rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error(f"{keys.architecture}.rope.scaling.type is {kind!r}, this decoder has linear and yarn")
    for name, usual in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("attn_factor", 1.0)):
        if keys.has(f"rope.scaling.{name}") and keys.number(f"rope.scaling.{name}") not in (usual, -1.0):
            raise keys.error(f"{keys.architecture}.rope.scaling.{name} is not {usual:g}, which this decoder can't do")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    betas = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    return yarn | {name: keys.number(short) for name, short in betas.items() if keys.has(short)}


def _llama3(keys: MetadataReader, theta: float) -> dict[str, Any] | None:
    factors = _table(keys, FACTORS)
    if (factors == 1).all():
        return None
    originals = [_ORIGINAL_CONTEXT]
    if keys.has("rope.scaling.original_context_length"):
        originals.insert(0, keys.count("rope.scaling.original_context_length"))
    scaling = llama3_scaling(factors, theta, [n for n in originals if n])
    if scaling is None:
        raise keys.error(f"{FACTORS} doesn't follow Llama 3's rule, which this decoder has")
    return scaling


def _longrope(keys: MetadataReader) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "short_factor": [_decimal(factor) for factor in _table(keys, SHORT)],
        "long_factor": [_decimal(factor) for factor in _table(keys, LONG)],
        "original_max_position_embeddings": original,
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if original > 1 and abs(attention - attention_factor(scaling, keys.count("context_length"))) > 1e-6:
        scaling["attention_factor"] = attention
    return scaling


def _table(keys: MetadataReader, name: str) -> np.ndarray:
    """The factors of each frequency."""
    info = keys.header.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.type.name != "F32" or info.shape[0] > _MOST_FREQUENCIES:
        raise keys.error(f"{name} must be a vector of F32")
    return np.array(read_tensor(info).read())


def _biases(keys: MetadataReader) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors}


def _llama(keys: MetadataReader) -> dict[str, Any]:
    return {**_biases(keys), "mlp_bias": "blk.0.ffn_up.bias" in keys.header.tensors}


def _mistral(keys: MetadataReader) -> dict[str, Any]:
    return {"sliding_window": keys.count("attention.sliding_window")}


def _qwen2(keys: MetadataReader) -> dict[str, Any]:
    window = keys.count("attention.sliding_window", 0)
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}


def _qwen3(keys: MetadataReader) -> dict[str, Any]:
    return {**_qwen2(keys), **_biases(keys)}


def _gemma(keys: MetadataReader) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", **_biases(keys)}


def _gemma2(keys: MetadataReader) -> dict[str, Any]:
    head_dim = keys.count("attention.key_length")
    if keys.count("block_count") == 46:  # the 27B model, whose scale llama.cpp knows by its number of layers
        head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    return {
        "query_pre_attn_scalar": head_dim,
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        **_gemma(keys),
    }


def _phi3(keys: MetadataReader) -> dict[str, Any]:
    return {"sliding_window": keys.count("attention.sliding_window", 0) or None}


def _olmo2(keys: MetadataReader) -> dict[str, Any]:
    if keys.count("attention.sliding_window", 0):
        raise keys.error("this is OLMo 3 (it has a sliding window), which this decoder doesn't have", "OLMo 2")
    return _biases(keys)


def _gpt_neox(keys: MetadataReader) -> dict[str, Any]:
    return {"use_parallel_residual": keys.flag(f"{keys.architecture}.use_parallel_residual", True)}


def _falcon(keys: MetadataReader) -> dict[str, Any]:
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    two_norms = "blk.0.attn_norm_2.weight" in keys.header.tensors
    grouped = two_norms or kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 1 + two_norms if grouped else None,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


_OWN: dict[str, Callable[[MetadataReader], dict[str, Any]]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma": _gemma, "gemma2": _gemma2,
    "phi3": _phi3, "olmo2": _olmo2, "gpt_neox": _gpt_neox, "falcon": _falcon,
}  # fmt: skip
