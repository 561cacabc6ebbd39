"""`Family`: how Hugging Face stores one architecture, as tables from its names to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE, FULL, NO_MLP, SLIDING, SPARSE
from mlxlm.config.model_config import MAX_LAYERS

HFConfig = Mapping[str, Any]  # a parsed config.json


@dataclass(frozen=True)
class Family:
    """The configuration fields and module names of one `model_type`.

    Attributes:
        model_type: Hugging Face's `model_type`.
        architecture: Hugging Face's class, the entry of `architectures`.
        fields: ModelConfig's field name -> Hugging Face's, or a tuple of names, of which the first is written.
        defaults: ModelConfig values for fields that `config.json` omits, as in transformers.
        fixed_values: ModelConfig values that every model of the family has.
        read_extra: Fields that `fields` can't express: Hugging Face's values -> ModelConfig's.
        write_extra: The inverse of `read_extra`.
        find_unsupported: Names a feature of a `config.json` that the decoder doesn't implement, or returns None.
        multimodal_type: The `model_type` of models with images whose language model this is. It is saved as one of
            those, since mlx_lm has no model of `model_type`. "": it is saved by itself.
        prefix: Prefix of all tensor names except the head's.
        other_prefixes: Prefixes that some files have instead.
        layers: Name of the list of layers, after `prefix`.
        head: Name of the output head.
        top_modules: Module in the file, after `prefix` -> module in the decoder, after "model.".
        layer_modules: The same inside one layer. Several modules of the decoder, separated by spaces, are fused into
            one matrix of the file. Modules with the same name on both sides may be omitted. A module for each expert
            has its number at "*". A parameter that belongs to another module in the file is listed by itself.
        layer_tensors: Tensors of a layer whose names aren't a module and its parameter -> tensors of the decoder. They
            are stacks of all experts, `[E, out, in]`, or `[E, in, out]` if `transposed`.
        other_layer_tensors: The same of files that aren't written.
        mlp_layer_modules: If set, feed-forwards are layers of their own in the file, after that of the mixer, and these
            are the entries of `layer_modules` for them.
        extra_layer_modules: Entries of `layer_modules` that depend on the configuration; those of mlx_lm, if the second
            argument is true.
        interleaved: Fused modules or tensors of a layer whose parts are interleaved -> the field with the number of
            groups.
        has_local_rope: Layers with a sliding window have a RoPE of their own (`rope_local_base_freq`).
        rope_interleaved: Rotary pairs are neighboring rows of queries and keys, not the two halves of a head.
        transposed: Modules or tensors of a layer whose weight is `[in, out]`.
        fused_kv_b: Programs whose files have the `kv_b_proj` of latent attention instead of its two parts:
            "transformers", "mlx_lm".
        has_mtp_layers: Files may have more layers, which predict several tokens and aren't used.
        mlx_lm_mismatch: Describes what mlx_lm's class lacks or computes instead of a configuration, or returns None.
        mlx_lm_adds_one: mlx_lm stores the weights of norms plus 1, the file and the decoder without.
        mlx_lm_names: Modules of a layer in the file -> their names in mlx_lm, where they differ; several, separated by
            spaces, if mlx_lm doesn't fuse them.
        mlx_lm_prefixes: Pairs of a prefix in the file and the prefix in mlx_lm, where they differ.
        ignored_suffixes: Suffixes of tensors that aren't parameters.
        ignored_prefixes: Their prefixes.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    read_extra: Callable[[HFConfig], Mapping[str, Any]] = lambda values: {}
    write_extra: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    find_unsupported: Callable[[HFConfig], str | None] = lambda values: None
    multimodal_type: str = ""
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ("",)
    layers: str = "layers"
    head: str = "lm_head"
    top_modules: Mapping[str, str] = field(default_factory=lambda: same_names("embed_tokens", "norm"))
    layer_modules: Mapping[str, str] = field(default_factory=dict)
    mlp_layer_modules: Mapping[str, str] = field(default_factory=dict)
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    other_layer_tensors: Mapping[str, str] = field(default_factory=dict)
    extra_layer_modules: Callable[[ModelConfig, bool], Mapping[str, str]] = lambda config, for_mlx: {}
    interleaved: Mapping[str, str] = field(default_factory=dict)
    has_local_rope: bool = False
    rope_interleaved: bool = False
    transposed: frozenset[str] = frozenset()
    fused_kv_b: tuple[str, ...] = ()
    has_mtp_layers: bool = False
    mlx_lm_mismatch: Callable[[ModelConfig], str | None] = lambda config: None
    mlx_lm_adds_one: bool = False
    mlx_lm_names: Mapping[str, str] = field(default_factory=dict)
    mlx_lm_prefixes: tuple[tuple[str, str], ...] = ()
    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()

    def file_layers(self, mlp_layer_types: Sequence[str]) -> list[tuple[int, Mapping[str, str]]]:
        """The decoder's layer that each layer of a file belongs to, and its modules: see `mlp_layer_modules`."""
        result = []
        for layer, kind in enumerate(mlp_layer_types):
            result.append((layer, self.layer_modules))
            if self.mlp_layer_modules and kind != NO_MLP:
                result.append((layer, self.mlp_layer_modules))
        return result

    def hf_names(self, field: str) -> tuple[str, ...]:
        """Hugging Face's names of a ModelConfig field, the preferred one first; empty if the family lacks the field."""
        names = self.fields.get(field, ())
        return (names,) if isinstance(names, str) else names

    def mlx_lm_modules(self, layer_modules: Mapping[str, str]) -> dict[str, str]:
        """A table of modules with the names of mlx_lm, where experts are stacked: ...switch_mlp.up_proj."""
        result: dict[str, str] = {}
        for name, modules in layer_modules.items():
            is_stacked = "experts.*" in name
            stacked = name.partition("experts.*")[0] + modules.removeprefix("mlp.") if is_stacked else name
            names = self.mlx_lm_names.get(name, stacked).split()
            result |= dict(zip(names, modules.split() if len(names) > 1 else [modules], strict=True))
        return result


def same_names(*names: str) -> dict[str, str]:
    """A table of names that are the same on both sides."""
    return {name: name for name in names}


# Fields with the same name in nearly every family.
COMMON_FIELDS = same_names(
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
LLAMA_FIELDS = COMMON_FIELDS | same_names("num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_theta")

# The three projections that many families fuse into one matrix.
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"

# The experts of most mixtures, and their number, which transformers 5 saves by the second name.
NUM_EXPERTS = "num_experts", "num_local_experts"
EXPERTS = {f"mlp.experts.*.{name}": f"mlp.switch_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}

# The experts as one stack of gates and up projections and one of down projections.
FUSED_EXPERTS = {
    "gate_up_proj": "mlp.switch_mlp.gate_proj.weight mlp.switch_mlp.up_proj.weight",
    "down_proj": "mlp.switch_mlp.down_proj.weight",
}

SHARED_EXPERTS = {
    f"mlp.shared_experts.{name}": f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")
}

# The matrix of latent attention from whose rows the decoder makes two modules, see `WeightMapping.per_head`.
KV_B_PROJ, KV_B_PARTS = "self_attn.kv_b_proj", "self_attn.embed_q self_attn.unembed_out"

# LayerNorm and a feed-forward without a gate, as in GPT-2 and its successors.
GPT_VALUES = {"norm": "layer", "mlp_gated": False}
MEGATRON_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}


def read_bool(values: HFConfig, name: str, default: bool) -> bool:
    """A boolean field; missing and null mean `default`."""
    value = values.get(name)
    return default if value is None else bool(value)


def inverse(value: float) -> float:
    """1 / `value` with 12 digits, of which the inverse is `value` again."""
    return float(f"{1 / value:.12g}")


def first_present(values: HFConfig, *names: str) -> Any:
    """The first of several fields that is neither missing nor null."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def four_times(hidden_size: Any) -> Any:
    """The usual feed-forward width. A value that isn't a number is returned as it is, for validation to report."""
    return 4 * hidden_size if isinstance(hidden_size, int) else hidden_size


def first_unexpected(values: HFConfig, **expected: Any) -> str | None:
    """Describe the first field whose value is neither null nor the only one that the decoder implements."""
    for name, value in expected.items():
        if values.get(name, value) not in (value, None):
            return f"{name} {values[name]!r}"
    return None


def read_sliding_window(
    values: HFConfig, window: Any, has_window: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """ModelConfig's `sliding_window` and `layer_types`, in one form for each meaning.

    Without any windowed layer `sliding_window` is None; if all layers have the window, `layer_types` is omitted.

    Args:
        values: The parsed `config.json`, whose `layer_types` has precedence.
        window: The size of the window, or None.
        has_window: Whether a layer has the window, if there is no `layer_types`.
    """
    types, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None and isinstance(layers, int) and layers <= MAX_LAYERS:
        types = [SLIDING if has_window(i) else FULL for i in range(layers)]
    if window is None or not isinstance(types, list) or SLIDING not in types:
        return {"sliding_window": None}
    if all(layer_type == SLIDING for layer_type in types):
        return {"sliding_window": window}
    return {"sliding_window": window, "layer_types": tuple(types)}


def read_mlp_layer_types(values: HFConfig, is_dense: Callable[[int], bool]) -> dict[str, Any]:
    """ModelConfig's `mlp_layer_types`, which is omitted if all layers have experts."""
    layers = values.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > MAX_LAYERS:
        return {}
    types = tuple(DENSE if is_dense(layer) else SPARSE for layer in range(layers))
    return {"mlp_layer_types": types} if DENSE in types else {}


def read_first_dense_layers(values: HFConfig, default: int, name: str = "first_k_dense_replace") -> dict[str, Any]:
    """`read_mlp_layer_types` of files in which the first layers are dense; `name`: the field with their number."""
    dense = values.get(name, default)
    return read_mlp_layer_types(values, lambda layer: isinstance(dense, int) and layer < dense)


def write_first_dense_layers(config: ModelConfig, name: str = "first_k_dense_replace") -> dict[str, Any]:
    """The inverse of `read_first_dense_layers`."""
    types = config.mlp_layer_types or ()
    return {name: next((layer for layer, layer_type in enumerate(types) if layer_type != DENSE), len(types))}


def read_shared_experts(values: HFConfig, default_width: int, default_count: int) -> dict[str, Any]:
    """ModelConfig's width of the shared expert, of files with a number of experts as wide as the others."""
    width, count = values.get("moe_intermediate_size", default_width), values.get("n_shared_experts", default_count)
    sizes = isinstance(width, int) and isinstance(count, int)
    return {"shared_expert_intermediate_size": (width * count or None) if sizes else count}


def write_shared_experts(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_shared_experts`."""
    width = config.moe_intermediate_size or 1
    return {"n_shared_experts": (config.shared_expert_intermediate_size or 0) // width}


def unsupported_layer_types(types: Mapping[str, Any]) -> str | None:
    """Say that no layer has experts, if the result of `read_mlp_layer_types` is so."""
    return "mixture in which all layers are dense" if set(types.get("mlp_layer_types", ())) == {DENSE} else None


def read_sliding_window_pattern(values: HFConfig, default_window: int, default_pattern: int) -> dict[str, Any]:
    """`read_sliding_window` of files where every layer whose number is a multiple of a pattern has full attention.

    The pattern is `sliding_window_pattern`, a number, or letters of which L is a layer with the window.
    """
    pattern = values.get("sliding_window_pattern") or default_pattern

    def has_window(layer: int) -> bool:
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L"
        return not isinstance(pattern, int) or (layer + 1) % pattern != 0

    return read_sliding_window(values, values.get("sliding_window", default_window), has_window)


def rope_in_windows(values: HFConfig, windows: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """ModelConfig's `rope_layers` of a family in which only layers with a window have rotary positions."""
    types, layers = windows.get("layer_types"), values.get("num_hidden_layers")
    if types is not None:
        return tuple(layer_type == SLIDING for layer_type in types)
    if windows["sliding_window"] is None and isinstance(layers, int) and layers <= MAX_LAYERS:
        return (False,) * layers
    return None


def write_sliding_window(config: ModelConfig, default: int | None = None) -> dict[str, Any]:
    """The inverse of `read_sliding_window`, with the type of every layer. `default` is the window if there is none."""
    types = config.layer_types or [FULL if config.sliding_window is None else SLIDING] * config.num_hidden_layers
    return {"sliding_window": config.sliding_window or default, "layer_types": list(types)}
