"""How a family's files name and keep the decoder's modules."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlxlm.config import ModelConfig
from mlxlm.families.family import Family
from mlxlm.families.registry import family_of
from mlxlm.families.weight_mapping import WeightMapping


def weight_mappings(config: ModelConfig, for_mlx: bool = False) -> list[WeightMapping]:
    """The modules that files of this configuration keep under other names, or together, or transposed.

    `for_mlx`: as mlx_lm's own modules are, and as folders that MLX quantized are: there GPT-2's weights aren't
    transposed. Families that mlx_lm lacks (OPT, Falcon, BLOOM) keep Hugging Face's names.
    """
    family = family_of(config)
    found = [_stored(family, config, family.head, ("lm_head",), for_mlx)]
    for theirs, ours in family.top_modules.items():
        found.append(_stored(family, config, family.prefix + theirs, (f"model.{ours}",), for_mlx))
    layer = {**family.layer, **family.extra_layer_modules(config)}
    for i in range(config.num_hidden_layers):
        for theirs, ours in layer.items():
            modules = tuple(f"model.layers.{i}.{module}" for module in ours.split())
            name = f"{family.prefix}{family.layers}.{i}.{theirs}"
            found.append(_stored(family, config, name, modules, for_mlx, theirs in family.transposed))
    return [stored for stored in found if not stored.is_rename or stored.modules != (stored.name,)]


def normalize_tensor_name(config: ModelConfig, name: str) -> str | None:
    """A tensor's name as `weight_mappings` knows it, whichever prefix the file has; None for what is no parameter of its own:
    masks and rotary frequencies, which old files stored, and the copy of a tied head.
    """
    family = family_of(config)
    if name.endswith(family.ignored_suffixes):
        return None
    if family.head != "lm_head" and name.startswith("lm_head."):
        name = family.head + name.removeprefix("lm_head")
    if config.tie_word_embeddings and name.rpartition(".")[0] in (family.head, _mlx_name(family, family.head)):
        return None
    for prefix in (prefix for prefix in family.other_prefixes if name.startswith(prefix)):
        rest = name.removeprefix(prefix)
        root = rest.partition(".")[0]
        if root in family.top_modules or root == family.layers:
            return family.prefix + rest
    return name


def is_mlx_layout(config: ModelConfig, names: Iterable[str]) -> bool:
    """Whether a file's names are those of mlx_lm's modules rather than Hugging Face's, so `layout(for_mlx=True)`."""
    family = family_of(config)
    return bool(family.mlx_names) and any(name.startswith("model.") for name in names)


def modules_of(family: Family, name: str) -> tuple[str, ...]:
    """The decoder's modules in a module of mlx_lm's: ("model.layers.0.self_attn.q_proj", ...)."""
    for theirs, mlx in family.mlx_names:
        if name.startswith(mlx):
            name = theirs + name.removeprefix(mlx)
            break
    if name == family.head:
        return ("lm_head",)
    rest = name.removeprefix(family.prefix)
    if match := re.fullmatch(rf"{family.layers}\.(\d+)\.(.+)", rest):
        return tuple(f"model.layers.{match[1]}.{ours}" for ours in family.layer.get(match[2], match[2]).split())
    return (f"model.{family.top_modules[rest]}",) if rest in family.top_modules else (name,)


def _stored(
    family: Family, config: ModelConfig, name: str, modules: tuple[str, ...], for_mlx: bool, transposed: bool = False
) -> WeightMapping:
    fused = len(modules) > 1
    return WeightMapping(
        _mlx_name(family, name) if for_mlx else name,
        modules,
        tuple(_rows(config, module) for module in modules) if fused else (),
        config.num_key_value_heads if fused and family.qkv_interleaved else 1,
        transposed and not for_mlx,
    )


def _rows(config: ModelConfig, module: str) -> int:
    if ".mlp." in module:
        return config.intermediate_size
    heads = config.num_attention_heads if module.endswith(".q_proj") else config.num_key_value_heads
    return heads * config.head_dim


def _mlx_name(family: Family, name: str) -> str:
    for theirs, mlx in family.mlx_names:
        if name.startswith(theirs):
            return mlx + name.removeprefix(theirs)
    return name
