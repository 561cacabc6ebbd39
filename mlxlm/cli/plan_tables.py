"""A plan as tables: the result of `mlxlm plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mlxlm.cli import render
from mlxlm.plan import Duration, Fits, Plan, bits_that_fit, training_memory
from mlxlm.utils.formatting import human_bytes, human_count, human_flops, human_seconds

_BAR = 32  # characters of the longest bar
_SHORT = {"projections": "project", "scores_values": "times values", "feed_forward": "feed fwd"}
_SHOWN = (512, 2048, 8192, 32768, 131072)  # lengths of the trend


def show(plan: Plan, formulas: bool = False) -> None:
    """What fits and how long it takes, then tables, on stdout; what is only assumed on stderr."""
    for line in advice(plan):
        render.result(line)
    render.result(_summary(plan))
    render.result("")
    _table("parameters", [(name, human_count(n), _percent(n, plan.parameter_count)) for name, n in _parts(plan)])
    _table("operations (forward, a token)", list(_flops(plan)))
    header = ("tokens", *(_SHORT.get(part, part) for part in plan.flops.forward), "total")
    _table("forward operations by length of the text", list(_trend(plan)), header)
    _table(_memory_title(plan), list(_memory(plan)))
    _table(_use_title(plan), list(_use(plan)))
    _table("time", list(_time(plan)))
    _table("disk", list(_disk(plan)))
    if formulas:
        _table("by the textbook", list(_textbook(plan)))
    if plan.duration.mfu_source == "assumed" and plan.measured_duration is None:
        share = f"{100 * plan.duration.mfu:.0f} %"
        render.say(f"a utilisation of {share} is assumed (try: --mfu, or --probe on this machine)")
    machine, dtype = plan.duration.machine, plan.training.dtype
    if dtype != machine.dtype and machine.kind != "metal":  # Apple's GPUs are about as fast in either
        render.say(f"the time is by the speed of {machine.dtype} products: those of {dtype} have another")


def _summary(plan: Plan) -> str:
    found = plan.measured_duration or plan.duration
    how = "by the probe" if plan.measured_duration else "planned"
    return f"{human_count(found.tokens)} tokens take {long_time(found.seconds)} of training, {how}"


def _table(title: str, rows: list[tuple[Any, ...]], header: tuple[str, ...] | None = None) -> None:
    render.print_result(render.table(rows, header, title))
    render.result("")


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _named(name: str) -> str:
    return name.replace("_", " ")


def _parts(plan: Plan) -> Iterator[tuple[str, int]]:
    for name, count in plan.parameters.items():
        if count:
            yield _named(name), count
    yield "total", plan.parameter_count


def _flops(plan: Plan) -> Iterator[tuple[str, str, str]]:
    flops = plan.flops
    for name, count in flops.forward.items():
        yield _named(name), human_count(count), _percent(count, flops.forward_total)
    yield (
        "forward",
        human_count(flops.forward_total),
        f"of it attention {_percent(flops.attention, flops.forward_total)}",
    )
    yield "backward", human_count(flops.backward), "twice the forward pass"
    if flops.recomputed:
        yield "recomputed", human_count(flops.recomputed), "the layers' forward pass"
    yield "a token", human_count(flops.per_token), f"by the rule of thumb {human_count(flops.rule_of_thumb)}"
    yield "a step", _operations(flops.per_step), f"{flops.tokens_per_step:,} tokens"
    yield "causal", human_count(flops.causal), "attention, were the hidden half of the scores left out"


def _trend(plan: Plan) -> Iterator[tuple[str, ...]]:
    flops_by_length = plan.flops_by_length
    for length, shares, total in zip(
        flops_by_length.lengths, flops_by_length.shares, flops_by_length.total, strict=True
    ):
        if length in _SHOWN:
            yield str(length), *(f"{100 * share:.1f} %" for share in shares.values()), _operations(total)


def _operations(count: float) -> str:
    """3.14e+23, and 3.14T where people have a word for it."""
    return human_count(count) if count < 1e15 else f"{count:.4g}"


def _bars(parts: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    most = max(parts.values(), default=0) or 1
    for name, size in parts.items():
        yield name, human_bytes(size), "█" * max(1, round(_BAR * size / most))


def _memory_title(plan: Plan) -> str:
    t = plan.training
    peak = "the update" if plan.memory.update > plan.memory.backward else "the backward pass"
    how = f"{t.optimizer}, {t.path(plan.config)} attention{', recomputed' if t.grad_checkpoint else ''}"
    where = " on each device" if plan.duration.num_devices > 1 else ""
    return f"memory of {t.batch_size} x {t.max_seq_length} tokens{where}, {how}; peak in {peak}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield from _bars(plan.memory.parts())
    yield "a layer's activations", human_bytes(plan.memory.layer), ""
    yield "peak", human_bytes(plan.memory.total), "predicted"
    if plan.measured is not None:
        yield "", human_bytes(plan.measured), f"measured: {_off(plan.memory.total, plan.measured)}"


def _off(predicted: float, measured: float) -> str:
    return f"the prediction was {100 * (predicted / measured - 1):+.0f} % off"


def _use_title(plan: Plan) -> str:
    s = plan.serving
    return f"memory in use: {s.num_sequences} x {s.context_length} tokens, {s.bits}-bit weights, {s.kv_bits}-bit cache"


def _use(plan: Plan) -> Iterator[tuple[str, str, str]]:
    found = plan.inference
    yield "weights", human_bytes(found.weights), f"{found.bits_per_weight:.2f} bits each"
    yield "cache", human_bytes(found.cache), f"{human_bytes(found.cache_per_token)} a token"
    yield "both", human_bytes(found.total), ""
    for name, size in found.caches.items():
        yield f"cache, {name}", human_bytes(size), ""


def _time(plan: Plan) -> Iterator[tuple[str, str, str]]:
    d = plan.duration
    speed = f"{human_flops(d.machine.flops)} ({d.machine.dtype}, {d.machine.source})"
    yield "machine", d.machine.name, speed if d.num_devices == 1 else f"{d.num_devices} x {speed}"
    kind = "measured" if d.machine.measured else "as given" if d.machine.source == "as given" else "its maker's peak"
    yield "mfu", f"{100 * d.mfu:.1f} %", f"{d.mfu_source}, of what is {kind}"
    optimal = f"compute-optimal are {human_count(plan.optimal_tokens)} (20 a parameter)"
    yield "tokens", human_count(d.tokens), optimal
    if plan.corpus is not None:
        how = "counted" if plan.corpus.counted else f"estimated from {human_bytes(plan.corpus.bytes)}"
        yield "text", human_count(plan.corpus.tokens), f"tokens, {how}: {plan.epochs:.1f} passes"
    yield "a step", f"{d.seconds_per_step:.3g} s", f"{d.tokens_per_second:,.0f} tokens/s, predicted"
    yield "training", long_time(d.seconds), f"{d.steps:,.0f} steps, predicted"
    if (m := plan.measured_duration) is not None:
        yield "a step", f"{m.seconds_per_step:.3g} s", f"measured: {_off(d.seconds_per_step, m.seconds_per_step)}"
        yield "training", long_time(m.seconds), f"by measured steps, {m.tokens_per_second:,.0f} tokens/s"
        yield "mfu", f"{100 * m.mfu:.1f} %", _reached(m)


def _reached(measured: Duration) -> str:
    if measured.mfu > 1:
        return "measured: other work slowed the machine when its speed was, so it says nothing"
    return "measured, of the operations that are done"


def long_time(seconds: float) -> str:
    """With days where it takes some."""
    return f"{seconds / 86_400:.1f} days" if seconds > 2 * 86_400 else human_seconds(seconds)


def _disk(plan: Plan) -> Iterator[tuple[str, str, str]]:
    disk = plan.disk
    yield "checkpoints", human_bytes(disk.checkpoints), f"{human_bytes(disk.checkpoint)} each"
    yield "shards", human_bytes(disk.shards), "of tokens"
    yield "the model", human_bytes(disk.model), "in 16 bits"


def _textbook(plan: Plan) -> Iterator[tuple[str, str, str]]:
    found = plan.textbook()
    training = "8ΦD" if plan.training.grad_checkpoint else "6ΦD"
    yield "12lh²", human_count(found["dense_parameters"]), "parameters of a dense decoder's layers"
    yield "2Φ", human_bytes(found["inference_bytes"]), "16-bit weights, of Φ parameters"
    yield "20Φ", human_bytes(found["training_bytes"]), "AdamW in mixed precision"
    yield "l(34bsh + 5bs²a)", human_bytes(found["activation_bytes"]), "16-bit activations, none recomputed"
    yield "4lbh(s + n)", human_bytes(found["cache_bytes"]), "16-bit cache of the batch, multi-head"
    yield "l(24bsh² + 4bs²h) + 2bshV", _operations(found["forward_flops"]), "operations forward, of the batch"
    yield training, _operations(found["training_flops"]), "operations of the whole training, D tokens"


def advice(plan: Plan) -> Iterator[str]:
    """What the machine has room for, and the cheapest change that makes training fit: a line each."""
    if plan.fits is None:
        return
    yield from _fits(plan, plan.fits)
    if plan.fits.training:
        return
    if plan.change is None:
        yield "no change makes this model fit"
    else:
        yield f"it fits with {plan.change.text} ({human_bytes(plan.change.needed)}): {plan.change.cost}"


def _fits(plan: Plan, fits: Fits) -> Iterator[str]:
    here = f"{human_bytes(fits.memory)} of {plan.duration.machine.name}"
    word = "fits" if fits.training else "does not fit"
    yield f"training {word} into the {here}: {human_bytes(plan.memory.total)}"
    yield _most_in_training(plan, fits)
    if fits.context_length:
        whole = ", all positions" if fits.context_length == plan.config.max_position_embeddings else ""
        yield f"most in use: a text of {fits.context_length:,} tokens{whole}"
        return
    s, bits = plan.serving, bits_that_fit(plan.config, plan.serving, fits.memory)
    size = human_bytes(plan.inference.weights)
    remedy = "no fewer bits are enough" if bits is None else f"it would with --bits {bits}"
    yield f"in use it does not fit, its {s.bits}-bit weights take {size}: {remedy}"


def _most_in_training(plan: Plan, fits: Fits) -> str:
    t, most = plan.training, []
    if fits.batch_size:
        whole = replace(t, batch_size=fits.batch_size).parts < t.parts
        most.append(f"batch {fits.batch_size:,}{', which cores do not share,' if whole else ''}")
    if fits.max_seq_length:
        beside = "" if fits.batch_size else f" at batch {t.batch_size:,}"
        most.append(f"{fits.max_seq_length:,} tokens a sequence{beside}")
    if most:
        return f"most in training: {', or '.join([*most, *([f'preset {fits.preset}'] if fits.preset else [])])}"
    least = human_bytes(training_memory(plan.config, replace(t, batch_size=1)).total)
    instead = f"the largest preset that fits is {fits.preset}" if fits.preset else "no preset fits"
    one = f"one sequence of {t.max_seq_length:,} tokens takes {least}"
    return f"most in training: nothing as planned, {one}; {instead}"
