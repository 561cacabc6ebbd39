"""`mlxlm compare`: how much two models differ."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm import checkpoint
from mlxlm.cli import render
from mlxlm.cli.options import EXISTING_PATH, MODEL, SectionedCommand, json_option, offline_option
from mlxlm.data.builtin import python_reference
from mlxlm.data.sources import read_documents
from mlxlm.data.text import Document, conversation_as_text, split_pieces
from mlxlm.utils.errors import one_line
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from mlxlm.convert.compare import Comparison, TensorDiff

_MAX_LISTED = 5
_TOKENS = "Number of tokens of the text to use."
_BUILT_IN = "Python's language reference"


@click.command(cls=SectionedCommand)
@click.argument("a", type=MODEL)
@click.argument("b", type=MODEL)
@offline_option
@click.option("--eval-text", type=EXISTING_PATH, help="Text to evaluate on.  [default: built in]")
@click.option("--tokens", type=click.IntRange(2), metavar="N", default=4096, show_default=True, help=_TOKENS)
@json_option
def compare(a: str, b: str, eval_text: Path | None, tokens: int, as_json: bool) -> None:
    """Compare model B with model A: outputs on a text, layers and weights.

    A and B are names of mlxlm models, folders, runs, hub ids, .gguf or .bin files with the same tokenizer. Layers are
    read one at a time, so models larger than memory can be compared.
    """
    from mlxlm.convert.compare import compare as run_compare
    from mlxlm.convert.compare import tensor_diff, tokenize_for_both

    first, second = checkpoint.open_checkpoint(a), checkpoint.open_checkpoint(b)
    ids, text_bytes = tokenize_for_both(first, second, lambda: _documents(eval_text), tokens)
    with render.phases_progress() as progress:
        layers, tensors = partial(progress, "comparing layers"), partial(progress, "comparing weights")
        outputs = run_compare(first, second, ids, text_bytes=text_bytes, progress=layers)
        weights = tensor_diff(first, second, tensors)
    if as_json:
        names = {"a": a, "b": b, "eval_text": str(eval_text or _BUILT_IN)}
        render.emit_json({**names, **outputs.to_dict(), "weights": weights.to_dict()})
        return
    render.result(summarize(outputs, weights))
    totals = [("loss, nats per token", f"{outputs.loss_a:.4f}", f"{outputs.loss_b:.4f}")]
    if outputs.bits_per_byte_a is not None:
        totals.append(("bits per byte", f"{outputs.bits_per_byte_a:.4f}", f"{outputs.bits_per_byte_b:.4f}"))
    totals.append(("weights", human_bytes(weights.nbytes_a), human_bytes(weights.nbytes_b)))
    totals.append(("bits per weight", f"{weights.bits_per_weight_a:.2f}", f"{weights.bits_per_weight_b:.2f}"))
    render.print_table(totals, ("", "A", "B"))
    windows = render.windows(outputs.context_length, outputs.stride)
    render.result(f"evaluated on: {eval_text or _BUILT_IN}, {outputs.tokens} tokens {windows}")
    for title, errors in (("hidden states", outputs.layers), ("weights", weights.tensors)):
        worst = sorted(errors.items(), key=lambda item: item[1], reverse=True)[:_MAX_LISTED]
        if rows := [(one_line(name), f"{error:.2e}") for name, error in worst if error]:
            render.print_table(rows, (f"largest errors, {title}", "relative"))
    for line in _differences(weights):
        render.result(one_line(line))


def summarize(outputs: Comparison, weights: TensorDiff | None = None) -> str:
    """One line that sums up a comparison."""
    if outputs.identical and (weights is None or weights.equal):
        return f"identical: bit-equal logits over {outputs.tokens} tokens"
    change, before, after = "", outputs.bits_per_byte_a, outputs.bits_per_byte_b
    if before is not None and after is not None:
        change = f", {round(after - before, 4) + 0.0:+.4f} bits per byte"  # + 0.0: no "-0.0000"
    numbers = f"KL {outputs.kl:.2g} nats/token, top-1 agreement {100 * outputs.top1_agreement:.1f} %{change}"
    if outputs.equal_to_rounding:
        return f"equal to rounding: {numbers}"
    worst_layers = outputs.worst_layers()
    return numbers + (f"; worst layers {', '.join(worst_layers)}" if worst_layers else "")


def _differences(weights: TensorDiff) -> Iterator[str]:
    for side, names in (("A", weights.only_a), ("B", weights.only_b)):
        if names:
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            yield f"only in {side}: {', '.join(names[:_MAX_LISTED])}{more}"
    for name, (shape_a, shape_b) in list(weights.shape_mismatches.items())[:_MAX_LISTED]:
        yield f"{name}: {list(shape_a)} in A, {list(shape_b)} in B"
    if len(weights.shape_mismatches) > _MAX_LISTED:
        yield f"and {len(weights.shape_mismatches) - _MAX_LISTED} more of different shapes"
    for name, (value_a, value_b) in weights.config.items():
        yield f"configuration: {name} is {value_a!r} in A, {value_b!r} in B"


def _documents(path: Path | None) -> Iterator[Document]:
    if path is not None:
        return map(conversation_as_text, read_documents([path]))
    text = "\n\n".join(message["content"] for messages in python_reference() for message in messages)
    return iter([Document(_BUILT_IN, split_pieces(iter((text,))))])
