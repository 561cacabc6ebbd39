"""How checkpoint files store the decoder's modules: renamed, fused, transposed or interleaved."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mlxlm.config import ModelConfig
from mlxlm.config.components import SPARSE
from mlxlm.config.counts import sublayers
from mlxlm.families.family import KV_B_PARTS, KV_B_PROJ, Family, same_names
from mlxlm.families.registry import family_of


@dataclass(frozen=True)
class WeightMapping:
    """One module of a file and the modules of the decoder whose rows it contains; or one parameter.

    Attributes:
        name: Module in the file, without ".weight" or ".bias"; or a whole tensor, as those in `modules` then are, too.
        modules: Modules of the decoder; more than one are fused.
        rows: Output rows of each fused module.
        groups: 1 if fused modules follow each other. With G groups, each module is cut into G equal parts, and the
            file has the first part of each module, then the second of each, and so on (BLOOM interleaves query, key
            and value by head: G = heads).
        transposed: The weight is `[in, out]`; unquantized files only (GPT-2's Conv1D).
        interleaved: With N heads, rotary pairs are neighboring rows in the file, but the two halves of a head in the
            decoder (llama.cpp and llama2.c). 0: not interleaved.
        rotary_dims: Number of rows of a head that are rotated, the first ones. 0: all.
        experts: Number of modules in the file, one for each expert with its number at "*", which are stacked in the
            decoder. 0: one module.
        per_head: The two fused modules have a matrix for each head in the decoder, `[G, in, rows]` and `[G, rows, in]`.
        channel_axis: Axis of size 1 that a convolution's weight, `[channels, taps]` in the decoder, has in the file: 1
            as in PyTorch, 2 as in MLX. 0: no convolution.
        offset: The weight in the file is that of the decoder plus this.
        head_vectors: With N heads, the decoder's vector is a matrix of N rows in the file, or with `experts` N vectors.
            0: neither.
        stacked: The first axis is that of the experts, the second one that of the rows.
        is_read_only: Files that are written have another mapping of these modules. Of a stack, `[E, out, in]` is read,
            too, as transformers 5 saves Qwen3-VL.
    """

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    interleaved: int = 0
    rotary_dims: int = 0
    experts: int = 0
    per_head: bool = False
    channel_axis: int = 0
    offset: float = 0.0
    head_vectors: int = 0
    stacked: bool = False
    is_read_only: bool = False

    @property
    def row_axis(self) -> int:
        """The axis of the rows."""
        return int(self.stacked)

    def expert_names(self) -> list[str]:
        """The modules of all experts."""
        return [self.name.replace("*", str(expert)) for expert in range(self.experts)]


def weight_mappings(config: ModelConfig, for_mlx: bool = False) -> list[WeightMapping]:
    """The modules that files of this configuration rename, fuse or transpose.

    Args:
        config: Configuration of the model.
        for_mlx: Use mlx_lm's module names, as folders quantized by MLX do; there GPT-2's weights aren't transposed.
            Families that mlx_lm lacks (OPT, Falcon, BLOOM) keep Hugging Face's names.
    """
    family = family_of(config)
    modules_of: dict[str, tuple[str, ...]] = {family.head: ("lm_head",)}
    modules_of |= {family.prefix + name: (f"model.{module}",) for name, module in family.top_modules.items()}
    extra = dict(family.extra_layer_modules(config, for_mlx))
    if family.rope_interleaved:
        extra |= same_names("self_attn.q_proj", "self_attn.k_proj")
    matrices = {
        f"model.layers.{i}.{matrix.module}": matrix
        for i, kind in enumerate(config.layer_sublayers)
        for sublayer in kind
        for matrix in sublayer.matrices
    }
    modules_of |= {name: (name,) for name, matrix in matrices.items() if matrix.group == "convolution"}
    mlps = config.mlp_layer_types or (SPARSE,) * config.num_hidden_layers
    for file_layer, (i, layer_modules) in enumerate(family.file_layers(mlps)):
        table = family.mlx_lm_modules(layer_modules) if for_mlx else layer_modules
        for name, fused in {**table, **extra}.items():
            modules = tuple(f"model.layers.{i}.{module}" for module in fused.split())
            modules_of[f"{family.prefix}{family.layers}.{file_layer}.{name}"] = modules
    q, k = config.num_attention_heads, config.num_key_value_heads
    heads_of = {"q_proj": q, "q_norm": q, "k_proj": k, "k_norm": k}
    mappings = []
    for name, modules in modules_of.items():
        stored = _mlx_lm_name(family, name) if for_mlx else name
        transposed = not for_mlx and name.endswith(tuple(family.transposed))
        part = modules[0].rpartition(".")[2]
        heads = heads_of.get(part, 0)
        interleaved = heads if family.rope_interleaved else 0
        if for_mlx and family.mlx_lm_adds_one and modules[0].endswith("norm"):
            mappings.append(WeightMapping(stored, modules, offset=1.0))
        elif modules[0] in matrices and matrices[modules[0]].group == "convolution":
            mappings.append(WeightMapping(stored, modules, channel_axis=2 if for_mlx else 1))
        elif heads and config.qk_norm == "layer_per_head" and part.endswith("norm"):
            each = heads if "*" in name else 0
            mappings.append(
                WeightMapping(
                    stored, modules, (), 1, False, interleaved, config.rotary_dims(), experts=each, head_vectors=heads
                )
            )
        elif "*" in name:
            mappings.append(WeightMapping(name, modules, experts=config.num_experts or 0))
        elif len(modules) > 1:
            if modules[0] not in matrices:  # of another kind of layer
                continue
            rows = tuple(matrices[module].outputs for module in modules)
            field = family.interleaved.get(name.removeprefix(family.prefix).split(".", 2)[-1])
            groups = getattr(config, field) if field else 1
            stacked = ".switch_mlp." in modules[0]
            mappings.append(WeightMapping(stored, modules, rows, groups, transposed, stacked=stacked))
        elif transposed or interleaved or modules != (stored,):
            mappings.append(WeightMapping(stored, modules, (), 1, transposed, interleaved, config.rotary_dims()))
    layer_tensors = {} if for_mlx else {**family.layer_tensors, **family.other_layer_tensors}
    for i, (name, fused) in product(range(config.num_hidden_layers), layer_tensors.items()):
        tensors = tuple(f"model.layers.{i}.{tensor}" for tensor in fused.split())
        if tensors[0].rpartition(".")[0] not in matrices:  # of another kind of layer
            continue
        rows = tuple(matrices[tensor.rpartition(".")[0]].outputs for tensor in tensors)
        groups = getattr(config, family.interleaved[name]) if name in family.interleaved else 1
        full_name = f"{family.prefix}{family.layers}.{i}.{name}"
        is_read_only = name in family.other_layer_tensors
        transposed = name in family.transposed
        mappings.append(
            WeightMapping(full_name, tensors, rows, groups, transposed, stacked=True, is_read_only=is_read_only)
        )
    if ("mlx_lm" if for_mlx else "transformers") in family.fused_kv_b:
        mappings += kv_b_mappings(config)
    return mappings


def kv_b_mappings(config: ModelConfig) -> list[WeightMapping]:
    """The `kv_b_proj` of latent attention, which also files with mlx_lm's other names may have; [] without it."""
    if config.kv_lora_rank is None:
        return []
    heads, family = config.num_attention_heads, family_of(config)
    rows = heads * (config.qk_nope_head_dim or 0), heads * (config.v_head_dim or 0)
    mappings = []
    for i in range(config.num_hidden_layers):
        modules = tuple(f"model.layers.{i}.{part}" for part in KV_B_PARTS.split())
        name = f"{family.prefix}{family.layers}.{i}.{KV_B_PROJ}"
        mappings.append(WeightMapping(name, modules, rows, groups=heads, per_head=True))
    return mappings


def normalize_tensor_name(config: ModelConfig, name: str) -> str | None:
    """A tensor's name with the prefix that `weight_mappings` has.

    None for tensors that aren't parameters: masks and rotary frequencies in old files, the copy of a tied head, and the
    key and value projections of layers that share those of others.
    """
    family = family_of(config)
    if name.endswith(family.ignored_suffixes) or name.startswith(family.ignored_prefixes):
        return None
    layer = re.match(rf"{family.prefix}{family.layers}\.(\d{{1,9}})\.(self_attn\.[kv]_)?", name)
    if layer is not None:
        is_mtp = family.has_mtp_layers and int(layer[1]) >= config.num_hidden_layers
        if is_mtp or (layer[2] and config.shares_kv(int(layer[1]))):
            return None
    if family.head != "lm_head" and name.startswith("lm_head."):
        name = family.head + name.removeprefix("lm_head")
    if config.tie_word_embeddings and name.rpartition(".")[0] in (family.head, _mlx_lm_name(family, family.head)):
        return None
    for prefix in (prefix for prefix in family.other_prefixes if name.startswith(prefix)):
        rest = name.removeprefix(prefix)
        root = rest.partition(".")[0]
        if root in family.top_modules or root == family.layers:
            return family.prefix + rest
    return name


def is_mlx_layout(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether tensors are mlx_lm's rather than Hugging Face's: `weight_mappings(config, for_mlx=True)`.

    Args:
        config: Configuration of the model.
        shapes: Shape of each tensor, by its name in the file. A convolution's is `[C, taps, 1]` in MLX.
    """
    own_names = bool(family_of(config).mlx_lm_prefixes)
    stacks = re.compile(r"\.(switch_mlp|switch_glu|experts)\.(gate|up|down)_proj\.")
    return any(
        stacks.search(name)
        or (own_names and name.startswith("model."))
        or (name.endswith(".conv1d.weight") and len(shape) == 3 and shape[1] > shape[2])
        for name, shape in shapes.items()
    )


def decoder_modules(family: Family, name: str, file_layers: Sequence[tuple[int, Mapping[str, str]]]) -> tuple[str, ...]:
    """The decoder's modules in a module of mlx_lm, such as ("model.layers.0.self_attn.q_proj", ...).

    Args:
        family: The family of the model.
        name: The module's name.
        file_layers: See `Family.file_layers`.
    """
    for hf_prefix, mlx_prefix in family.mlx_lm_prefixes:
        if name.startswith(mlx_prefix):
            name = hf_prefix + name.removeprefix(mlx_prefix)
            break
    if name == family.head:
        return ("lm_head",)
    rest = name.removeprefix(family.prefix)
    if match := re.fullmatch(rf"{family.layers}\.(\d{{1,9}})\.(.+)", rest):
        number = int(match[1])
        layer, modules = file_layers[number] if number < len(file_layers) else (number, family.layer_modules)
        fused = {KV_B_PROJ: KV_B_PARTS, **family.mlx_lm_modules(modules)}.get(match[2], match[2])
        return tuple(f"model.layers.{layer}.{module}" for module in fused.split())
    return (f"model.{family.top_modules[rest]}",) if rest in family.top_modules else (name,)


def _mlx_lm_name(family: Family, name: str) -> str:
    for hf_prefix, mlx_prefix in family.mlx_lm_prefixes:
        if name.startswith(hf_prefix):
            return mlx_prefix + name.removeprefix(hf_prefix)
    return name


def quantizable_modules(config: ModelConfig) -> Callable[[str], bool]:
    """Return a function of a module's name: whether its matrix may be quantized.

    Routers and convolutions keep their precision, and so do the two modules of `kv_b_proj`, whose rows aren't those of
    the matrix in the file.
    """
    matrices = (matrix for sublayer, _ in sublayers(config) for matrix in sublayer.matrices)
    exact = tuple(matrix.module for matrix in matrices if matrix.group in ("router", "convolution"))
    per_head = {m for mapping in weight_mappings(config, for_mlx=True) if mapping.per_head for m in mapping.modules}
    return lambda module: not module.endswith(exact) and module not in per_head
