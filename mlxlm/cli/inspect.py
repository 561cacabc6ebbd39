"""`mlxlm inspect`: what a checkpoint is, from its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.utils.formatting import human_bytes, human_count

if TYPE_CHECKING:
    from mlxlm.convert.inspect import Description


@click.command()
@click.argument("source")
@click.option("--tensors", "list_tensors", is_flag=True, help="List all tensors: name, type, shape, bytes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def inspect(source: str, list_tensors: bool, as_json: bool) -> None:
    """Show what SOURCE is: format, architecture, size, quantization, tokenizer.

    SOURCE is a folder, a run, a hub id, a .gguf or a .bin file. Only headers are read.
    """
    from mlxlm.checkpoint.open import open_checkpoint
    from mlxlm.convert.inspect import describe
    from mlxlm.utils.errors import one_line

    checkpoint = open_checkpoint(source)
    found = describe(checkpoint)
    tensors = checkpoint.tensors.items()
    rows = [(one_line(name), t.stored_dtype, "x".join(map(str, t.shape)), t.nbytes) for name, t in tensors]
    if as_json:
        listed = [dict(zip(("name", "type", "shape", "bytes"), row, strict=True)) for row in rows]
        render.emit_json(found.to_dict() | ({"tensor_list": listed} if list_tensors else {}))
        return
    for name, value in lines(found):
        render.result(render.hanging_indent(f"{name:<14} ", one_line(value)))  # much of it is text out of files
    if list_tensors:
        render.print_result(render.table(rows, ("name", "type", "shape", "bytes")))
    for warning in found.warnings:
        render.say(f"warning: {warning}", style="yellow")


def lines(found: Description):
    """(heading, text) in the order in which a person reads them."""
    from mlxlm.checkpoint.layer_names import group_by_value

    yield "path", found.path
    yield "format", found.format
    run = f"run by {found.runtime}" if found.problem is None else f"can't be run: {found.problem}"
    yield "family", f"{found.family}, {run}"
    yield from found.architecture.items()
    yield "parameters", f"{human_count(found.parameters)} in {found.tensors} tensors"
    yield "size", f"{human_bytes(found.bytes)}, {found.bits_per_weight:.2f} bits per weight"
    types = (f"{name} {human_bytes(size)} in {count} tensors" for name, (count, size) in found.types.items())
    yield "types", "; ".join(types)
    if found.quantization:
        yield "quantization", _plan(found.quantization)
        for plan, names in group_by_value(
            {name: _plan(entry) for name, entry in found.layer_overrides.items()}
        ).items():
            yield f"  {plan}", names
    cache = found.cache_per_token
    per_token = "" if cache is None else f", and {human_bytes(1000 * cache)} for 1,000 tokens of context"
    yield "memory here", f"{human_bytes(found.memory)} for the weights{per_token}"
    tokenizer = found.tokenizer
    if tokenizer is None:
        yield "tokenizer", "none that mlxlm reads"
        return
    ends = f"begins {tokenizer.bos_token or '-'}, ends {tokenizer.eos_token or '-'}"
    template = "with a chat template" if tokenizer.chat_template else "no chat template"
    counts = f"{tokenizer.vocab_size} tokens ({len(tokenizer.special_tokens)} special)"
    yield "tokenizer", f"{tokenizer.tokenizer_type}, {counts}, {ends}, {template}"


def _plan(entry) -> str:
    if entry is False:
        return "as it is"
    if entry is True or not entry:
        return "default"
    mode = entry.get("mode", "affine")
    if "bits" not in entry:
        return str(mode)
    return f"{mode} {entry['bits']} bits in groups of {entry.get('group_size', 'its own size')}"
