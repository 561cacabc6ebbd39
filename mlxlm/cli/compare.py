"""`mlxlm compare`: how far two models are apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxlm.cli import render
from mlxlm.utils.formatting import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxlm.convert.compare import Comparison
    from mlxlm.convert.tensor_diff import TensorDiff
    from mlxlm.data import Document

_WORST = 5
_BUILT_IN = "Python's language reference"


@click.command()
@click.argument("a", type=str)
@click.argument("b", type=str)
@click.option("--eval-text", type=click.Path(exists=True, path_type=Path), help="To measure on.  [default: built in]")
@click.option("--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Of the text, its first ones.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def compare(a: str, b: str, eval_text: Path | None, tokens: int, as_json: bool) -> None:
    """Compare model B with model A: what they say about a text, their layers, their weights.

    A and B are folders, runs, hub ids, .gguf or .bin files with the same tokenizer. Layers are read one at a time, so
    models larger than memory can be compared.
    """
    from mlxlm.checkpoint.open import open_checkpoint
    from mlxlm.convert.compare import compare as run_compare
    from mlxlm.convert.compare import tokenize_for_both
    from mlxlm.convert.tensor_diff import tensor_diff
    from mlxlm.utils.errors import one_line

    first, second = open_checkpoint(a), open_checkpoint(b)
    ids, text_bytes = tokenize_for_both(first, second, lambda: _documents(eval_text), tokens)
    with render.counted_progress("comparing layers") as progress:
        said = run_compare(first, second, ids, text_bytes=text_bytes, progress=progress)
    with render.counted_progress("comparing weights") as progress:
        stored = tensor_diff(first, second, progress)
    if as_json:
        names = {"a": a, "b": b, "eval_text": str(eval_text or _BUILT_IN)}
        render.emit_json({**names, **said.to_dict(), "weights": stored.to_dict()})
        return
    render.result(summarize(said, stored))
    render.print_result(render.table(_totals(said, stored), ("", "A", "B")))
    render.result(
        f"measured on: {eval_text or _BUILT_IN}, {said.tokens} tokens {render.windows(said.context_length, said.stride)}"
    )
    for title, errors in (("hidden states", said.layers), ("weights", stored.tensors)):
        worst_layers = sorted((name for name in errors if errors[name]), key=errors.get, reverse=True)[:_WORST]
        if worst_layers:
            rows = [(one_line(name), f"{errors[name]:.2e}") for name in worst_layers]
            render.print_result(render.table(rows, (f"largest errors, {title}", "relative")))
    for line in _apart(stored):
        render.result(one_line(line))


def summarize(said: Comparison, stored: TensorDiff | None = None) -> str:
    """One line: what the numbers mean."""
    if said.identical and (stored is None or stored.equal):
        return f"identical: equal logits to the bit over {said.tokens} tokens"
    change = ""
    if said.bits_per_byte_a is not None:
        change = round(said.bits_per_byte_b - said.bits_per_byte_a, 4) + 0.0  # no "-0.0000"
        change = f", {change:+.4f} bits per byte"
    numbers = f"KL {said.kl:.2g} nats/token, top-1 agreement {100 * said.top1_agreement:.1f} %{change}"
    if said.equal_to_rounding:
        return f"equal to rounding: {numbers}"
    worst_layers = said.worst_layers()
    return numbers + (f"; worst layers {', '.join(worst_layers)}" if worst_layers else "")


def _totals(said: Comparison, stored: TensorDiff) -> list[tuple[str, str, str]]:
    rows = [("loss, nats per token", f"{said.loss_a:.4f}", f"{said.loss_b:.4f}")]
    if said.bits_per_byte_a is not None:
        rows.append(("bits per byte", f"{said.bits_per_byte_a:.4f}", f"{said.bits_per_byte_b:.4f}"))
    rows.append(("weights", human_bytes(stored.nbytes_a), human_bytes(stored.nbytes_b)))
    rows.append(("bits per weight", f"{stored.bits_per_weight_a:.2f}", f"{stored.bits_per_weight_b:.2f}"))
    return rows


def _apart(stored: TensorDiff):
    for side, names in (("A", stored.only_a), ("B", stored.only_b)):
        if names:
            more = f" and {len(names) - _WORST} more" if len(names) > _WORST else ""
            yield f"only in {side}: {', '.join(names[:_WORST])}{more}"
    for name, (shape_a, shape_b) in list(stored.shape_mismatches.items())[:_WORST]:
        yield f"{name}: {list(shape_a)} in A, {list(shape_b)} in B"
    if len(stored.shape_mismatches) > _WORST:
        yield f"and {len(stored.shape_mismatches) - _WORST} more of other shapes"
    for name, (value_a, value_b) in stored.config.items():
        yield f"configuration: {name} is {value_a!r} in A, {value_b!r} in B"


def _documents(path: Path | None) -> Iterator[Document]:
    from mlxlm.data import Document, documents
    from mlxlm.data.builtin import python_reference
    from mlxlm.data.text import split_pieces
    from mlxlm.quantize.text import conversation_as_text

    if path is not None:
        return map(conversation_as_text, documents([path]))
    text = "\n\n".join(message["content"] for messages in python_reference() for message in messages)
    return iter([Document(_BUILT_IN, split_pieces(iter((text,))))])
