"""`mlxlm inspect`: describe a checkpoint by its headers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from mlxlm import checkpoint
from mlxlm.cli import render
from mlxlm.cli.options import MODEL, SectionedCommand, json_option, offline_option
from mlxlm.utils.errors import one_line
from mlxlm.utils.formatting import group_layers_by_value, human_bytes, human_count

if TYPE_CHECKING:
    from mlxlm.convert.inspect import Description


@click.command(cls=SectionedCommand)
@click.argument("source", type=MODEL)
@offline_option
@click.option("--tensors", "list_tensors", is_flag=True, help="List all tensors with type, shape and bytes.")
@json_option
def inspect(source: str, list_tensors: bool, as_json: bool) -> None:
    """Describe SOURCE: format, architecture, size, quantization, tokenizer.

    SOURCE is a name of mlxlm models, a folder, a run, a hub id, or a .gguf or .bin file. Only headers are read.
    """
    from mlxlm.convert.inspect import describe

    source_checkpoint = checkpoint.open_checkpoint(source)
    description = describe(source_checkpoint)
    tensors = source_checkpoint.tensors.items()
    rows = [(one_line(name), t.stored_dtype, "x".join(map(str, t.shape)), t.nbytes) for name, t in tensors]
    if as_json:
        listed = [dict(zip(("name", "type", "shape", "bytes"), row, strict=True)) for row in rows]
        render.emit_json(description.to_dict() | ({"tensor_list": listed} if list_tensors else {}))
        return
    for name, value in lines(description):
        render.result(render.hanging_indent(f"{name:<14} ", one_line(value)))  # much of it comes from files
    if list_tensors:
        render.print_table(rows, ("name", "type", "shape", "bytes"))
    render.warn(description.warnings)


def lines(description: Description) -> Iterator[tuple[str, str]]:
    """(heading, text) of each line to print."""
    yield "path", description.path
    yield "format", description.format
    run = f"run by {description.runtime}" if description.problem is None else f"can't be run: {description.problem}"
    yield "family", f"{description.family}, {run}"
    yield from description.architecture.items()
    yield "parameters", f"{human_count(description.parameters)} in {description.tensors} tensors"
    yield "size", f"{human_bytes(description.bytes)}, {description.bits_per_weight:.2f} bits per weight"
    types = (f"{name} {human_bytes(size)} in {count} tensors" for name, (count, size) in description.types.items())
    yield "types", "; ".join(types)
    if description.quantization:
        yield "quantization", _describe_quantization(description.quantization)
        for text, names in group_layers_by_value(
            {name: _describe_quantization(entry) for name, entry in description.layer_overrides.items()}
        ).items():
            yield f"  {text}", names
    cache = description.cache_per_token
    per_token = "" if cache is None else f", and {human_bytes(1000 * cache)} for 1,000 tokens of context"
    yield "memory here", f"{human_bytes(description.memory)} for the weights{per_token}"
    tokenizer = description.tokenizer
    if tokenizer is None:
        yield "tokenizer", "none that mlxlm reads"
        return
    ends = f"BOS {tokenizer.bos_token or '-'}, EOS {tokenizer.eos_token or '-'}"
    template = "with a chat template" if tokenizer.chat_template else "no chat template"
    counts = f"{tokenizer.vocab_size} tokens ({len(tokenizer.special_tokens)} special)"
    yield "tokenizer", f"{tokenizer.tokenizer_type}, {counts}, {ends}, {template}"


def _describe_quantization(entry: Any) -> str:
    if entry is False:
        return "not quantized"
    if entry is True or not entry:
        return "default"
    mode = entry.get("mode", "affine")
    if "bits" not in entry:
        return str(mode)
    return f"{mode} {entry['bits']} bits in groups of {entry.get('group_size', 'its own size')}"
