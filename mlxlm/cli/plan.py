"""`mlxlm plan`: what a model, its training and its use cost, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.overrides import override_option, with_overrides
from mlxlm.cli.run_options import DEFAULT_MAX_SEQ_LENGTH, FLAGS, setting_options

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig
    from mlxlm.plan import Machine, Plan

_TRAINING = (
    "batch_size",
    "max_seq_length",
    "grad_accumulation_steps",
    "optimizer",
    "ema_decay",
    "dtype",
    "grad_checkpoint",
)
_USE = ("bits", "group_size", "context_length", "num_sequences", "kv_bits")

# The sizes of a model without a name, and the fields of ModelConfig that they are.
_SIZES = (
    ("--hidden-size", "hidden_size", "Width of the model (instead of MODEL)."),
    ("--num-layers", "num_hidden_layers", "Number of layers."),
    ("--num-heads", "num_attention_heads", "Attention heads."),
    ("--num-kv-heads", "num_key_value_heads", "Key-value heads (default: as many as heads)."),
    ("--head-dim", "head_dim", "Dimensions of a head (default: hidden / heads)."),
    ("--intermediate-size", "intermediate_size", "Width of the feed-forward (default: 8/3 of hidden, in 64s)."),
    ("--vocab-size", "vocab_size", "Vocabulary.  [default: 32000]"),
)


def _size_options(command):
    for flag, field, text in reversed(_SIZES):
        command = click.option(flag, field, type=click.IntRange(min=1), help=text)(command)
    return command


@click.command()
@click.argument("model", required=False)
@_size_options
@click.option("--tie-word-embeddings", is_flag=True, help="Embedding and head are one matrix; with --hidden-size.")
@override_option
@setting_options(
    without=set(FLAGS) - set(_TRAINING),
    help_texts={"max_seq_length": "Tokens per sequence (default: the model's context, at most 512)."},
)
@click.option("--attention", type=click.Choice(["plain", "blockwise", "fused"]), help="In training.")
@click.option("--loss-chunk-size", type=click.IntRange(min=0), help="To compare: rows of logits at a time; 0: all.")
@click.option("--tokens", type=float, help="To train on, such as 1.4e12 (default: 20 per parameter).")
@click.option("--data", multiple=True, help="Text or prepared shards, to count passes over. Can be repeated.")
@click.option("--text-column", metavar="NAME", help="Of tables and JSON lines.  [default: text, or messages]")
@click.option("--machine", help="here, a100, a100-sparse, h100, h200, m1 or m1-pro.  [default: here]")
@click.option("--flops", type=float, help="A machine of so many operations per second, such as 312e12, instead.")
@click.option("--mfu", type=float, help="Share of its speed that training reaches.  [default: 0.4]")
@click.option("--num-devices", type=click.IntRange(min=1), help="Such machines, each with its own batch.  [default: 1]")
@click.option(
    "--bits", type=int, help="Of a weight in use: 32, 16, 8, 6, 5, 4, 3 or 2.  [default: its own, or 16; on a CPU 32]"
)
@click.option("--group-size", type=int, help="Of quantized weights: 32, 64 or 128.  [default: its own, or 64]")
@click.option("--context-length", type=int, help="Tokens of a text in use.  [default: 4096, or the model's positions]")
@click.option("--num-sequences", type=int, help="Texts side by side in use.  [default: 1]")
@click.option("--kv-bits", type=int, help="Of a cached number: 32, 16, 8 or 4.  [default: 16, on a CPU 32]")
@click.option("--probe", "probed", is_flag=True, help="Try three steps here: predicted beside measured.")
@click.option("--textbook", is_flag=True, help="Also what the literature's short formulas say of it.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw where the memory goes to this .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(model: str | None, probed: bool, textbook: bool, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Count parameters, operations, memory, time and disk of MODEL: a preset, a published model, a folder, a run, a
    config.json, a .gguf file or a hub id; or of the sizes that you give.
    """
    from mlxlm import plan as planner
    from mlxlm.plan.inference import quantized_bits

    _reject_unused_options(model, probed, options)
    config = _config(model, options)
    if options["group_size"] is not None and (options["bits"] or quantized_bits(config) or 16) >= 16:
        raise click.UsageError("--group-size would have no effect: the weights aren't quantized; give --bits")
    given = {name: options[name] for name in (*_TRAINING, *_USE, "attention", "loss_chunk_size")}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("max_seq_length", min(DEFAULT_MAX_SEQ_LENGTH, config.max_position_embeddings))
    if probed:
        from mlxlm.train.start import set_default_dtype

        set_default_dtype(dict(given))
    found = planner.plan(
        config,
        tokens=options["tokens"],
        data=options["data"],
        text_column=options["text_column"],
        machine=_machine(options),
        num_devices=options["num_devices"] or 1,
        mfu=options["mfu"],
        **given,
    )
    if probed:
        found = _probed(found)
    if plot is not None:
        from mlxlm.plan.plot import draw

        draw(found, plot)
    if as_json:
        render.emit_json({**found.to_dict(), **({"textbook": found.textbook()} if textbook else {})})
    else:
        from mlxlm.cli.plan_tables import show

        show(found, textbook)
    if (bits := given.get("bits") or quantized_bits(config) or found.serving.bits) != found.serving.bits:
        render.say(f"a CPU turns {bits}-bit weights into {found.serving.bits}-bit ones as it loads them")
    if (bits := given.get("kv_bits", found.serving.kv_bits)) != found.serving.kv_bits:
        render.say(f"beside these weights a cache of {bits} bits has {found.serving.kv_bits} on a CPU")


def _reject_unused_options(model: str | None, probed: bool, options: dict[str, Any]) -> None:
    """Raise a UsageError for options that would have no effect, and for a model that is not said, or said twice."""
    sizes = [flag for flag, field, _ in _SIZES if options[field] is not None] + ["--tie-word-embeddings"] * options[
        "tie_word_embeddings"
    ]
    if model is not None and sizes:
        raise click.UsageError(f"{' and '.join(sizes)} would have no effect: {model} has its own sizes")
    needed = [flag for flag, field, _ in _SIZES[:3] if options[field] is None]
    if model is None and needed:
        raise click.UsageError(f"give MODEL, or its sizes ({', '.join(needed)} missing)")
    if options["text_column"] is not None and not options["data"]:
        raise click.UsageError("--text-column would have no effect: --data is not given")
    elsewhere = options["flops"] is not None or options["machine"] not in (None, "here")
    if options["flops"] is not None and options["machine"] is not None:
        raise click.UsageError("--flops and --machine each say what the machine is: give one")
    if probed and (elsewhere or options["num_devices"] or options["mfu"]):
        raise click.UsageError("--probe measures this machine: give no other, no devices and no utilisation")
    for name in ("attention", "loss_chunk_size"):
        if probed and options[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for plans: a probe trains as mlxlm pretrain does")


def _config(model: str | None, options: dict[str, Any]) -> ModelConfig:
    from mlxlm.config import ModelConfig
    from mlxlm.plan import find_config

    if model is None:
        hidden = options["hidden_size"]
        sizes = {field: options[field] for _, field, _ in _SIZES if options[field] is not None}
        usual = {"intermediate_size": -(-8 * hidden // 3 // 64) * 64, "vocab_size": 32000}
        config = ModelConfig(**{**usual, **sizes}, tie_word_embeddings=options["tie_word_embeddings"])
    else:
        config = find_config(model)
    return with_overrides(config, options["overrides"], {})


def _machine(options: dict[str, Any]) -> Machine | str:
    from mlxlm.plan.machines import custom_machine

    if options["flops"] is None:
        return options["machine"] or "here"
    return custom_machine(options["flops"], options["dtype"] or "bfloat16")


def _probed(found: Plan) -> Plan:
    """With the time and memory that three steps took."""
    from mlxlm.cli.training import phase
    from mlxlm.train import TrainSettings, probe
    from mlxlm.train.start import check_memory
    from mlxlm.train.step_benchmark import BENCHMARK_LABEL

    names = {name: getattr(found.training, name) for name in _TRAINING}
    settings = TrainSettings.provisional(names)
    length = found.training.max_seq_length
    config = found.config.with_changes(max_position_embeddings=length, quantization=None)
    check_memory(config, settings, preset="preset")
    with phase(BENCHMARK_LABEL, None):
        measured = probe(config, settings)
    return found.probed(measured.step, measured.memory)
