"""`mlxlm plan`: estimate what a model, its training and its inference cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import mlxlm.plan as planner
from mlxlm import train
from mlxlm.cli import render
from mlxlm.cli.options import (
    MODEL,
    SIZE,
    SectionedCommand,
    data_option,
    given_values,
    json_option,
    offline_option,
    option,
    reject_unused_options,
)
from mlxlm.cli.run_options import override_option, with_overrides
from mlxlm.cli.training import phase
from mlxlm.cli.training_options import FLAGS, default_max_seq_length, setting_options
from mlxlm.train.settings import TrainSettings

_TRAINING = (
    *("batch_size", "max_seq_length", "grad_accumulation_steps", "optimizer", "ema_decay", "dtype"),
    *("param_dtype", "optimizer_state", "grad_checkpoint"),
)
_INFERENCE = ("bits", "group_size", "context_length", "num_sequences", "kv_bits", "num_hosts")

_setting_options = setting_options(
    set(FLAGS) - set(_TRAINING),
    {
        "batch_size": "Sequences per forward pass.  [default: 16]",
        "max_seq_length": "Tokens per sequence.  [default: the model's context, at most 512]",
        "ema_decay": "Plan for an exponential moving average of the weights, if above 0.  [default: 0.0]",
    },
)
_BITS = "Bits per weight: 32, 16, 8, 6, 5, 4, 3 or 2.  [default: the model's own, or 16; 32 on a CPU]"
_GROUP_SIZE = "Group size of quantized weights: 32, 64 or 128.  [default: the model's own, or 64]"
_CONTEXT = "Tokens per sequence.  [default: 4096, or the model's context if shorter]"
_KV_BITS = "Bits of the key-value cache: 32, 16, 8 or 4.  [default: 16; 32 on a CPU]"
_MACHINE = "here, a100, a100-sparse, h100, h200, or an Apple chip from m1 to m5-max, such as m4-pro.  [default: here]"
_data = partial(option, "Training data")
_machine_option = partial(option, "Machine")
_inference = partial(option, "Inference")


@click.command(cls=SectionedCommand)
@click.argument("model", type=MODEL)
@offline_option
@override_option
@_setting_options
@_data("--tokens", float, "Training tokens, such as 1.4e12.  [default: 20 per parameter]")
@_data("--data", str, "Text or prepared shards, to count epochs. Repeatable.", multiple=True)
@data_option("text_column", "Training data")
@_machine_option("--machine", str, _MACHINE)
@_machine_option("--memory", SIZE, "Memory of the machine, such as 36GB.  [default: the machine's, if known]")
@_machine_option("--flops", float, "FLOP/s of a machine, such as 312e12, instead of --machine.", advanced=True)
@_machine_option("--mfu", float, "Model FLOPs utilization of training.  [default: 0.4]", advanced=True)
@_machine_option(
    "--num-devices", click.IntRange(1), "Number of devices, each with its own batch.  [default: 1]", advanced=True
)
@_machine_option("--probe with_probe", bool, "Run three training steps here, and compare with the prediction.")
@_inference("--bits", int, _BITS)
@_inference("--group-size", int, _GROUP_SIZE, advanced=True)
@_inference("--context-length", int, _CONTEXT)
@_inference("--num-sequences", int, "Number of sequences at once.  [default: 1]", advanced=True)
@_inference("--kv-bits", int, _KV_BITS, advanced=True)
@_inference("--hosts num_hosts", int, "Number of machines that share the model.  [default: 1]", advanced=True)
@json_option
def plan(model: str, with_probe: bool, as_json: bool, **options: Any) -> None:
    """Estimate parameters, FLOPs, memory, time and disk of MODEL.

    MODEL is a preset, a published model, a name of mlxlm models, a folder, a run, a config.json, a .gguf file or a hub
    id.
    """
    _check_options(with_probe, options)
    config = with_overrides(planner.find_config(model), options["overrides"], {})
    if options["group_size"] is not None and (options["bits"] or planner.quantized_bits(config) or 16) >= 16:
        raise click.UsageError("--group-size would have no effect: the weights aren't quantized; give --bits")
    settings = given_values({name: options[name] for name in (*_TRAINING, *_INFERENCE)})
    settings.setdefault("max_seq_length", default_max_seq_length(config))
    if with_probe:
        from mlxlm.train.start import set_default_dtype

        set_default_dtype(dict(settings))
    result = planner.plan(
        config,
        tokens=options["tokens"],
        data=options["data"],
        text_column=options["text_column"],
        machine=_machine(options),
        memory=options["memory"],
        num_devices=options["num_devices"] or 1,
        mfu=options["mfu"],
        **settings,
    )
    if with_probe:
        result = probe(result)
    if as_json:
        render.emit_json(result.to_dict())
    else:
        from mlxlm.cli.plan_tables import print_plan

        print_plan(result)
    if (bits := settings.get("bits") or planner.quantized_bits(config) or result.serving.bits) != result.serving.bits:
        render.say(f"on a CPU, {bits}-bit weights become {result.serving.bits}-bit weights when they are loaded")
    if (bits := settings.get("kv_bits", result.serving.kv_bits)) != result.serving.kv_bits:
        render.say(f"on a CPU, a key-value cache of {bits} bits has {result.serving.kv_bits} bits with these weights")


def _check_options(with_probe: bool, options: dict[str, Any]) -> None:
    """Raise UsageError for options that contradict each other or would have no effect."""
    reject_unused_options(options, (not options["data"], ["text_column"], "--data is not given"))
    other_machine = options["flops"] is not None or options["machine"] not in (None, "here")
    if options["flops"] is not None and options["machine"] is not None:
        raise click.UsageError("--flops and --machine both describe the machine: give one of them")
    if with_probe and (other_machine or options["num_devices"] or options["mfu"]):
        raise click.UsageError("--probe measures this machine: give no --machine, --flops, --num-devices or --mfu")


def _machine(options: dict[str, Any]) -> planner.Machine | str:
    if options["flops"] is None:
        return options["machine"] or "here"
    return planner.custom_machine(options["flops"], options["dtype"] or "bfloat16")


def probe(plan: planner.Plan) -> planner.Plan:
    """Add the measured time and memory of three training steps to a plan for this machine."""
    from mlxlm.train.memory_limits import check_memory
    from mlxlm.train.step_benchmark import BENCHMARK_LABEL

    settings = TrainSettings.provisional({name: getattr(plan.training, name) for name in _TRAINING})
    length = plan.training.max_seq_length
    config = plan.config.with_changes(max_position_embeddings=length, quantization=None)
    check_memory(config, settings, preset="preset")
    with phase(BENCHMARK_LABEL, None):
        measured = train.probe(config, settings)
    return plan.with_measurement(measured.step, measured.memory)
