"""The configuration of a decoder, in Hugging Face's names, validated as a whole; and the presets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mlxlm.errors import ConfigError
from mlxlm.resources import resource

_MAX = 2**31 - 1  # sizes beyond this can't be array dimensions in MLX


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, assembled from parts by these fields. The defaults are Llama's; names and meanings are those
    of Hugging Face's `LlamaConfig`, and of the family that first had a field for what Llama lacks.

    `num_key_value_heads` equal to `num_attention_heads` is multi-head attention, 1 is multi-query
    attention, anything between is grouped-query attention.

    `norm` "rms" or "layer" (with bias), `rms_norm_eps` being the epsilon of either; `norm_unit_offset`: the weight
    is stored less one (Gemma). `norm_placement`: "pre" (on a sublayer's input), "output" (on its output, before
    the addition: OLMo 2) or "both" (Gemma 2). `parallel_residual`: attention and feed-forward see the same stream,
    by one norm (`shared_norm`, Falcon 7B) or by one each.

    `positions`: "rope", "learned" (a table whose first `position_offset` rows stand for no position: OPT has 2),
    "alibi" or "none". `rope_scaling` is Hugging Face's object with `rope_type`; `partial_rotary_factor` is the
    share of a head that turns. `sliding_window`: tokens that a row sees, its own included, in the layers that
    `layer_types` calls "sliding_attention" (None: in all). `qk_norm`: "head" (Qwen 3) or "projection" (OLMo 2).
    `attention_bias` has query, key and value, `attention_out_bias` the output (None: as `attention_bias`).
    `attn_logit_softcapping`, `final_logit_softcapping`, `query_pre_attn_scalar`: Gemma 2's. `mlp_gated`: gate · up,
    else one projection up and the activation `hidden_act`. `embedding_multiplier` scales the embeddings,
    `embedding_norm` normalises them (BLOOM).

    `quantization` is MLX's: `{"bits": 4, "group_size": 64, "mode": "affine"}` and, by layer name, either such an
    object or False for a layer left as it is.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    model_type: str = "llama"
    norm: str = "rms"
    norm_unit_offset: bool = False
    norm_placement: str = "pre"
    parallel_residual: bool = False
    shared_norm: bool = False
    positions: str = "rope"
    position_offset: int = 0
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    qk_norm: str | None = None
    attention_out_bias: bool | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    mlp_gated: bool = True
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    quantization: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None and _is_count(self.hidden_size) and _is_count(self.num_attention_heads):
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        problems = list(_problems(self))
        if problems:
            raise ConfigError("this configuration can't work: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read Hugging Face's configuration. Fields that don't concern a decoder are left out.

        Raises ConfigError, naming `source`, for a missing field, an impossible size, or a feature that
        this decoder doesn't have (another `model_type`, scaled rotary positions).
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: a configuration is a JSON object, not {type(values).__name__}")
        values = dict(values)
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{source}: rope_parameters is {rope!r}", 'an object such as {"rope_type": "default"}')
        if "rope_theta" in rope:  # transformers 5 keeps it there
            values.setdefault("rope_theta", rope["rope_theta"])
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", None):
            raise ConfigError(f"{source}: rotary scaling {kind!r} is not supported", 'rope_type "default"')
        known = {f.name for f in fields(cls)}
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [name for name in required if values.get(name) is None]
        if missing:
            raise ConfigError(f"{source}: missing {', '.join(missing)}", "a complete Llama-style configuration")
        chosen = {k: v for k, v in values.items() if k in known and (v is not None or k in required)}
        try:
            return cls(**chosen)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.message}", error.hint) from None

    @classmethod
    def load(cls, path: Path | str) -> ModelConfig:
        """Read `config.json` from a file or a model folder."""
        return cls.from_dict(read_json(path), source=str(path))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A configuration that ships with mlxlm, e.g. `preset("5m", vocab_size=4096)`."""
        known = preset_names()
        if name not in known:
            raise ConfigError(f"there is no preset {name!r}", "one of " + ", ".join(known))
        path = resource("models", "presets", f"{name}.json")
        return cls.from_dict({**read_json(path), **changes}, source=f"preset {name}")

    def to_dict(self) -> dict[str, Any]:
        """Hugging Face's `config.json`, complete, so that other tools need no default of theirs."""
        values = {k: v for k, v in asdict(self).items() if v is not None}
        # transformers 5 reads rope_parameters, older versions and mlx_lm read rope_theta.
        return {
            "architectures": ["LlamaForCausalLM"],
            **values,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "torch_dtype": "float32",
        }

    def with_changes(self, **changes: Any) -> ModelConfig:
        """A copy with other values, validated again."""
        return replace(self, **changes)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text."""
        eos = self.eos_token_id
        return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)

    def matmul_parameters(self) -> int:
        """Weights that each token is multiplied with: the layers' matrices and the output head."""
        h, d = self.hidden_size, self.head_dim
        attention = 2 * h * d * (self.num_attention_heads + self.num_key_value_heads)
        return self.num_hidden_layers * (attention + 3 * h * self.intermediate_size) + h * self.vocab_size

    def parameter_count(self) -> int:
        """All parameters, counted once where embedding and head are tied."""
        h, d, layers = self.hidden_size, self.head_dim, self.num_hidden_layers
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * h
        norms = (2 * layers + 1) * h
        biases = 0
        if self.attention_bias:
            biases += layers * (d * (self.num_attention_heads + 2 * self.num_key_value_heads) + h)
        if self.mlp_bias:
            biases += layers * (2 * self.intermediate_size + h)
        return self.matmul_parameters() + embedding + norms + biases

    def flops_per_token(self, context: int, training: bool = False) -> int:
        """Floating-point operations for one token that attends to `context` keys, 2 per multiply-add.

        Forward: 2 per matrix parameter, and 4·H·D·context per layer for the scores and the weighted sum
        of values. Training: 3 times that, the backward pass being twice the forward one (Kaplan et al.
        2020, section 2.1). In training under a causal mask the mean context is half the sequence.
        """
        attention = 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * context
        forward = 2 * self.matmul_parameters() + attention
        return 3 * forward if training else forward

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that one token adds to the key-value cache, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value


def preset_names() -> list[str]:
    """Presets from the smallest to the largest."""
    paths = list(resource("models", "presets").glob("*.json"))
    return [p.stem for p in sorted(paths, key=lambda p: ModelConfig.from_dict(read_json(p)).parameter_count())]


def read_json(path: Path | str) -> Any:
    """The JSON value in a file, or in `config.json` of a folder. Raises ConfigError naming the file."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "the folder of a model or of a run") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX


def _problems(c: ModelConfig):
    """Every problem of a configuration, each with a value that would work."""
    counts = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim",
    )  # fmt: skip
    bad = [name for name in counts if not _is_count(getattr(c, name))]
    for name in bad:
        yield f"{name} is {getattr(c, name)!r}, it must be a positive whole number"
    if not bad:
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        if heads % kv:
            fits = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
            yield f"num_key_value_heads {kv} does not divide num_attention_heads {heads} (one of {fits} does)"
        if c.hidden_size % heads:  # transformers refuses to build such a model
            fits = heads * -(-c.hidden_size // heads)
            yield f"hidden_size {c.hidden_size} is no multiple of num_attention_heads {heads} ({fits} is)"
        if c.head_dim % 2:
            yield f"head_dim {c.head_dim} is odd, rotary positions need an even one ({c.head_dim + 1})"
        if c.parameter_count() > 10**13:
            yield f"it has {c.parameter_count():.3g} parameters, check hidden_size and num_hidden_layers"
    for name in ("rms_norm_eps", "rope_theta"):
        value = getattr(c, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            yield f"{name} is {value!r}, it must be a positive number"
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if not isinstance(getattr(c, name), bool):
            yield f"{name} is {getattr(c, name)!r}, it must be true or false"
    if c.hidden_act != "silu":
        yield f"hidden_act is {c.hidden_act!r}, this decoder has silu (SwiGLU)"
    if c.model_type != "llama":
        yield f"model_type is {c.model_type!r}, this decoder is llama"
    if c.quantization is not None:
        yield from _quantization_problems(c.quantization)
    ids = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
    if any(i is not None and (isinstance(i, bool) or not isinstance(i, int) or i < 0) for i in ids):
        yield f"eos_token_id is {c.eos_token_id!r}, it must be a token id or a list of them"


def _quantization_problems(quantization: Any):
    if not isinstance(quantization, Mapping):
        yield f"quantization is {quantization!r}, it must be an object with bits and group_size"
        return
    plans = {"quantization": quantization, **{k: v for k, v in quantization.items() if isinstance(v, Mapping)}}
    for name, plan in plans.items():
        if plan.get("mode", "affine") != "affine":
            yield f"{name}: mode is {plan['mode']!r}, it must be 'affine'"
        if plan.get("bits") not in (2, 3, 4, 5, 6, 8):
            yield f"{name}: bits is {plan.get('bits')!r}, it must be 2, 3, 4, 5, 6 or 8"
        if plan.get("group_size") not in (32, 64, 128):
            yield f"{name}: group_size is {plan.get('group_size')!r}, it must be 32, 64 or 128"
