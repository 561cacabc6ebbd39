"""Prints the result of `mlxlm plan` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mlxlm.cli import render
from mlxlm.plan import Fits, Plan, bits_that_fit, training_memory
from mlxlm.utils.formatting import human_bytes, human_count, human_flops, human_seconds

_BAR = 32  # characters of the longest bar


def print_plan(plan: Plan) -> None:
    """Print what fits, how long training takes, and tables on stdout; assumptions on stderr."""
    for line in advice(plan):
        render.result(line)
    render.result(_summary(plan))
    render.result("")
    counts = {**plan.parameters, "total": plan.parameter_count}
    if plan.config.num_experts is not None:
        counts["active"] = plan.config.active_parameter_count()
    percent = partial(_percent, whole=plan.parameter_count)
    _table("parameters", [(_spaced(name), human_count(n), percent(n)) for name, n in counts.items() if n])
    _table("FLOPs (forward, per token)", _flops(plan))
    _table(_memory_title(plan), _memory(plan))
    _table(_inference_title(plan), _inference(plan))
    _table("time", _time(plan))
    disk = plan.disk
    checkpoints = ("checkpoints", human_bytes(disk.checkpoints), f"{human_bytes(disk.checkpoint)} each")
    rest = (("shards", human_bytes(disk.shards), "tokens"), ("model", human_bytes(disk.model), "in 16 bits"))
    _table("disk", (checkpoints, *rest))
    if plan.duration.mfu_source == "assumed" and plan.measured_duration is None:
        mfu = f"{100 * plan.duration.mfu:.0f}%"
        render.say(f"a model FLOPs utilization of {mfu} is assumed (try: --mfu, or --probe on this machine)")
    machine, dtype = plan.duration.machine, plan.training.dtype
    if dtype != machine.dtype and machine.device_type != "metal":  # Apple's GPUs are about as fast in both
        render.say(f"the time is for {machine.dtype} products; {dtype} products have another speed")


def _summary(plan: Plan) -> str:
    duration = plan.measured_duration or plan.duration
    source = "measured by the probe" if plan.measured_duration else "predicted"
    return f"Training on {human_count(duration.tokens)} tokens takes {long_time(duration.seconds)}, {source}"


def _table(title: str, rows: Iterable[tuple[Any, ...]], header: tuple[str, ...] = ()) -> None:
    render.print_table(list(rows), header, title)
    render.result("")


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _flops(plan: Plan) -> Iterator[tuple[str, str, str]]:
    flops = plan.flops
    for name, count in flops.forward.items():
        yield _spaced(name), human_count(count), _percent(count, flops.forward_total)
    attention = _percent(flops.attention, flops.forward_total)
    yield "forward", human_count(flops.forward_total), f"{attention} for attention"
    yield "backward", human_count(flops.backward), "twice the forward pass"
    if flops.recomputed:
        yield "recomputed", human_count(flops.recomputed), "forward pass of the layers"
    yield "per token", human_count(flops.per_token), f"rule of thumb: {human_count(flops.rule_of_thumb)}"
    yield "per step", _operations(flops.per_step), f"{flops.tokens_per_step:,} tokens"
    yield "causal", human_count(flops.causal), "attention without the masked half of the scores"


def _operations(count: float) -> str:
    """3.14T, or 3.14e+23 for numbers without a common name."""
    return human_count(count) if count < 1e15 else f"{count:.4g}"


def _bars(parts: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    largest = max(parts.values(), default=0) or 1
    for name, size in parts.items():
        yield name, human_bytes(size), "█" * max(1, round(_BAR * size / largest))


def _memory_title(plan: Plan) -> str:
    t = plan.training
    peak = "the update" if plan.memory.update > plan.memory.backward else "the backward pass"
    checkpointing = ", gradient checkpointing" if t.grad_checkpoint else ""
    settings = f"{t.optimizer}, {t.attention_path(plan.config)} attention{checkpointing}"
    where = " on each device" if plan.duration.num_devices > 1 else ""
    return f"training memory of {t.batch_size} x {t.max_seq_length} tokens{where}, {settings}; peak in {peak}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield from _bars(plan.memory.breakdown())
    yield "activations of a layer", human_bytes(plan.memory.layer), ""
    yield "peak", human_bytes(plan.memory.total), "predicted"
    if plan.measured_memory is not None:
        yield "", human_bytes(plan.measured_memory), f"measured: {_off(plan.memory.total, plan.measured_memory)}"


def _off(predicted: float, measured: float) -> str:
    return f"the prediction was {100 * (predicted / measured - 1):+.0f}% off"


def _inference_title(plan: Plan) -> str:
    s = plan.serving
    return (
        f"inference memory of {s.num_sequences} x {s.context_length} tokens, {s.bits}-bit weights, "
        f"{s.kv_bits}-bit key-value cache{f', on each of {s.num_hosts} machines' if s.num_hosts > 1 else ''}"
    )


def _inference(plan: Plan) -> Iterator[tuple[str, str, str]]:
    inference = plan.inference
    yield "weights", human_bytes(inference.weights), f"{inference.bits_per_weight:.2f} bits each"
    yield "cache", human_bytes(inference.cache), f"{human_bytes(inference.cache_per_token)} per token"
    yield "total", human_bytes(inference.total), ""
    if bandwidth := plan.duration.machine.bandwidth:
        speed = plan.serving.num_sequences * bandwidth / inference.bytes_per_step
        reads = f"a step reads {human_bytes(inference.bytes_per_step)}, at {human_bytes(bandwidth)}/s"
        yield "speed", f"at most {human_count(speed)} tokens/s", reads
    if plan.serving.num_hosts > 1:
        sums = f"{2 * plan.config.num_hidden_layers} sums over the machines"
        yield "sent", f"{human_bytes(inference.sent_per_token)} per token", sums
    for name, size in inference.caches.items():
        yield f"cache, {name}", human_bytes(size), ""


def _time(plan: Plan) -> Iterator[tuple[str, str, str]]:
    d = plan.duration
    speed = f"{human_flops(d.machine.flops)} ({d.machine.dtype}, {d.machine.source})"
    yield "machine", d.machine.name, speed if d.num_devices == 1 else f"{d.num_devices} x {speed}"
    kind = "measured speed" if d.machine.measured else "given speed"
    if not d.machine.measured and d.machine.source != "as given":
        kind = "published peak speed"
    yield "mfu", f"{100 * d.mfu:.1f}%", f"{d.mfu_source}, of the {kind}"
    yield "tokens", human_count(d.tokens), f"compute-optimal: {human_count(plan.optimal_tokens)} (20 per parameter)"
    if plan.corpus is not None:
        how = "counted" if plan.corpus.counted else f"estimated from {human_bytes(plan.corpus.bytes)}"
        yield "text", human_count(plan.corpus.tokens), f"tokens, {how}: {plan.epochs:.1f} epochs"
    yield "per step", f"{d.seconds_per_step:.3g} s", f"{d.tokens_per_second:,.0f} tokens/s, predicted"
    yield "training", long_time(d.seconds), f"{d.steps:,.0f} steps, predicted"
    if (m := plan.measured_duration) is not None:
        yield "per step", f"{m.seconds_per_step:.3g} s", f"measured: {_off(d.seconds_per_step, m.seconds_per_step)}"
        yield "training", long_time(m.seconds), f"from measured steps, {m.tokens_per_second:,.0f} tokens/s"
        meaning = "measured, of the FLOPs that are computed"
        if m.mfu > 1:
            meaning = "measured: not meaningful, other work slowed the machine when its speed was measured"
        yield "mfu", f"{100 * m.mfu:.1f}%", meaning


def long_time(seconds: float) -> str:
    """A duration as text, in days if it takes more than two."""
    return f"{seconds / 86_400:.1f} days" if seconds > 2 * 86_400 else human_seconds(seconds)


def advice(plan: Plan) -> Iterator[str]:
    """What the machine has memory for, and the cheapest change that makes training fit: a line each."""
    if plan.fits is None:
        if sizes := plan.duration.machine.memory_options:
            choices = ", ".join(f"{size}GB" for size in sizes[:-1])
            yield f"For what fits, say how much memory the machine has: --memory {choices} or {sizes[-1]}GB"
        return
    yield from _fits(plan, plan.fits)
    if plan.fits.training:
        return
    if plan.change is None:
        yield "No change makes this model fit"
    else:
        yield f"It fits with {plan.change.text} ({human_bytes(plan.change.peak_memory)}): {plan.change.cost}"


def _fits(plan: Plan, fits: Fits) -> Iterator[str]:
    owner = "this machine's" if plan.duration.machine.name == "here" else f"the {plan.duration.machine.name}'s"
    memory = f"{owner} {human_bytes(fits.memory)}"
    verb = "fits" if fits.training else "does not fit"
    yield f"Training {verb} in {memory}: it takes {human_bytes(plan.memory.total)}"
    yield _largest_training(plan, fits)
    if fits.context_length:
        note = " (all positions)" if fits.context_length == plan.config.max_position_embeddings else ""
        yield f"Longest context that fits in inference: {fits.context_length:,} tokens{note}"
        return
    s, bits = plan.serving, bits_that_fit(plan.config, plan.serving, fits.memory)
    size = human_bytes(plan.inference.weights)
    remedy = "no number of bits is small enough" if bits is None else f"--bits {bits} would fit"
    yield f"Inference does not fit: the {s.bits}-bit weights take {size}; {remedy}"


def _largest_training(plan: Plan, fits: Fits) -> str:
    """The largest batch, sequence length and preset that fit."""
    t = plan.training
    preset = [f"preset: {fits.preset}"] if fits.preset else []
    if fits.batch_size:
        cores = (
            ", which the cores don't share"
            if replace(t, batch_size=fits.batch_size).num_workers < t.num_workers
            else ""
        )
        rest = [f"sequence length: {fits.max_seq_length:,}"] if fits.max_seq_length else []
        return "; or ".join([f"Largest batch that fits: {fits.batch_size:,}{cores}", *rest, *preset])
    if fits.max_seq_length:
        length = f"Longest sequence that fits at batch {t.batch_size:,}: {fits.max_seq_length:,} tokens"
        return "; or ".join([length, *preset])
    needed = human_bytes(training_memory(plan.config, replace(t, batch_size=1)).total)
    instead = f"the largest preset that fits is {fits.preset}" if fits.preset else "no preset fits"
    return f"No batch fits: one sequence of {t.max_seq_length:,} tokens takes {needed}; {instead}"
