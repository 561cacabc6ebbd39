"""`mlxlm models`: list models, download, remove and verify them, list presets; and ask which one to chat with."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import mlxlm.plan as planner
from mlxlm import generation
from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, bundled_models, catalog, default_entry
from mlxlm.checkpoint.download import check_files, download, find, find_catalog_entry, no_such_model, resolve
from mlxlm.checkpoint.local_models import (
    HUB,
    INCOMPLETE,
    LocalModel,
    find_entry,
    find_removable,
    folder_size,
    local_models,
    remove,
)
from mlxlm.cli import render
from mlxlm.cli.options import MODEL, PATH, SectionedCommand, allow_sleep_option, json_option, option
from mlxlm.cli.render import spinner
from mlxlm.cli.training import phase, run_training, stop_on_signal
from mlxlm.families import config_to_hf, load_config, load_preset, preset_names
from mlxlm.train.events import Step, Stopped
from mlxlm.utils.errors import MlxlmError
from mlxlm.utils.formatting import human_bytes, human_count

_COLUMNS = {
    "name": "name",
    "parameters": "params",
    "bytes": "size",
    "context_length": "context",
    "license": "license",
    "memory": "memory",
    "fits": "fits",
    "location": "on disk",
}
_OTHERS = {"name": "other models", "bytes": "size", "memory": "memory", "fits": "fits", "location": "of"}


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """List the models that mlxlm knows by name, and others on this machine.

    Without a subcommand, this is mlxlm models list.
    """
    if ctx.invoked_subcommand is None:
        _print_models(as_json)
    elif as_json:
        raise click.UsageError("--json belongs after the subcommand: mlxlm models list --json")


@models.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List the models that mlxlm knows by name, and others on this machine.

    Every command takes what the first column shows as its MODEL. "memory" is about the most that a chat of up to
    4,096 tokens takes. Where a download is incomplete, pull continues it, and rm removes it.
    """
    _print_models(as_json)


@models.command()
@click.argument(
    "name", type=MODEL, shell_complete=lambda _ctx, _param, text: [name for name in catalog() if name.startswith(text)]
)
def pull(name: str) -> None:
    """Download a model, or continue its download. NAME is one of the list, or a hub id, owner/name."""
    entry = catalog().get(name)
    if entry is None:
        if not hub.is_id(name):
            raise no_such_model(name)
        render.result(str(hub.download(name)))
        return
    local = find_entry(entry)
    if local is not None:
        check_files(entry, local.path)
        render.say(f"{name} is on this machine already")
    render.result(str(download(entry) if local is None else local.path))


@models.command()
@click.argument("name", type=MODEL)
@click.option("--yes", is_flag=True, help="Don't ask.")
def rm(name: str, yes: bool) -> None:
    """Remove a downloaded model. NAME is one of the list, or a hub id.

    Models in the folders of ollama and LM Studio are not removed.
    """
    model = find_removable(name)
    what = f"{model.path}, {human_bytes(model.bytes)}"
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed without a terminal, to remove {what}")
    if not yes:
        click.confirm(f"Remove {what}?", abort=True, err=True)
    remove(model)
    render.say(f"removed {what}")


@models.command()
@json_option
def presets(as_json: bool) -> None:
    """List the model sizes that ship with mlxlm, for pretrain --preset."""
    configs = {name: load_preset(name) for name in preset_names()}
    if as_json:
        counts = {name: {**config_to_hf(c), "parameters": c.parameter_count()} for name, c in configs.items()}
        render.emit_json(counts)
        return
    header = ("preset", "parameters", "hidden", "layers", "heads", "KV heads", "vocabulary", "context", "KV/token")
    rows = [
        (
            name,
            human_count(c.parameter_count()),
            c.hidden_size,
            c.num_hidden_layers,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.vocab_size,
            c.max_position_embeddings,
            human_bytes(c.kv_bytes_per_token()),
        )
        for name, c in configs.items()
    ]
    render.print_table(rows, header)


@models.command(cls=SectionedCommand)
@click.argument("model", default="small-world")
@option("Training", "--steps", click.IntRange(1, 200), "Compare the losses of the first N steps.", default=10)
@option("Training", "--all", bool, "Train to the end, and compare the weights and what follows from them, too.")
@option("Training", "--out", PATH, "Keep the run in this new folder.  [default: a temporary one]")
@allow_sleep_option("Training")
def verify(model: str, steps: int, out: Path | None, **flags: bool) -> None:
    """Train MODEL again from its receipt.json, and compare.

    MODEL is small-world, a run of mlxlm speedrun, or a receipt. The receipt has the digests of the corpus, the tokens
    and the weights, the settings, and the losses of the first steps. On the same kind of machine with the same version
    of MLX all of them are equal, to the bit. On another one sums are rounded differently: losses are close if they
    differ by at most 0.001 nats up to step 20 and by 0.1 after it, and weights if their bits per byte differ by at most
    25%. A receipt that was changed is refused. If anything is different, the exit code is 1.
    """
    from mlxlm.experiments.receipt import FILE_NAME, Receipt, environment

    path = resolve(model)
    receipt = Receipt.read(path if path.is_file() else path / FILE_NAME)
    there, here = receipt.results["environment"], environment()
    others = [f"{name} {here[name]}, there {value}" for name, value in there.items() if here.get(name) != value]
    if others:
        render.say(f"Another kind of machine or another version: {'; '.join(others)}", style="yellow")
    recipe = receipt.recipe
    if here["device"] == "CPU" and recipe.settings.get("dtype", "float32") != "float32":
        render.say("A CPU computes 16-bit products many times slower, so this training is in float32", style="yellow")
        recipe = replace(recipe, settings={**recipe.settings, "dtype": "float32"})
    with tempfile.TemporaryDirectory() as temporary:
        run = recipe.start(out or Path(temporary, "run"), phase)
        stop = stop_on_signal()

        def stop_after(step: Step, _lm: generation.LoadedModel) -> None:
            if step.step >= steps and not flags["all"]:
                stop.requested = True

        ending = run_training(run, stop=stop, on_step=stop_after)
        if isinstance(ending, Stopped) and (flags["all"] or ending.step < steps):
            raise click.exceptions.Exit(stop.exit_code)
        different = []
        for comparison in receipt.compare(run):
            render.result(f"{comparison.name}: {comparison.result}, {comparison.detail}")
            different += [comparison.name] if comparison.result == "different" else []
    if different:
        raise MlxlmError(f"different from the receipt: {', '.join(different)}")


def choose_model(yes: bool) -> str:
    """Return the name of the model to chat with.

    In a terminal, this asks for one: the default of the catalog, the largest that fits, or any other.

    Args:
        yes: Take the default without asking.

    Raises:
        click.UsageError: There is no terminal to ask in.
    """
    default = default_entry()
    if yes:
        return default.name
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"MODEL is missing (try: --yes for {default.name}, {human_bytes(default.bytes)}; a name of mlxlm models; "
            "or --continue)"
        )
    choices = [(default, f"small, {'on this machine already' if find_entry(default) else 'downloaded in seconds'}")]
    with spinner("measuring this machine"):
        machine, best = planner.this_machine(measure=False), planner.best_entry()
    if best is not None and best.parameters > default.parameters:
        choices.append((best, "the largest that leaves half of the memory free"))
    render.say("Which model?\n")
    for number, (entry, why) in enumerate(choices, start=1):
        memory = human_bytes(planner.entry_fit(entry, machine).memory)
        size = "no download" if find_entry(entry) else f"{human_bytes(entry.bytes)} to download"
        tested = "" if entry.tested else ", untested"
        facts = f"{size}, {memory} of memory, {render.license_text(entry)}{tested}"
        render.say(f"  {number}  {entry.name:<13} {why}")
        render.say(f"     {'':<13} {facts}\n", style="dim")
    render.say("Enter takes the first. A name of mlxlm models, a path and a hub id work too.", style="dim")
    names = [entry.name for entry, _ in choices]
    answer: str = click.prompt("Model", default="1", err=True, value_proc=lambda text: _chosen(text, names))
    return answer


def _chosen(text: str, names: list[str]) -> str:
    """Return the name that the answer stands for, or raise UsageError, after which click asks again."""
    text = hub.without_address(text.strip())
    if text.isdecimal() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if find_catalog_entry(text) is None and find(text) is None and not hub.is_id(text):
        raise click.UsageError(str(no_such_model(text)))
    return text


def _print_models(as_json: bool) -> None:
    machine = planner.this_machine(measure=False)
    known = [_bundled(name, folder, machine) for name, folder in bundled_models().items()]
    known += [_entry(entry, machine) for entry in catalog().values() if entry.name not in bundled_models()]
    paths = {model["path"] for model in known}
    others = [_local(model, machine) for model in local_models() if str(model.path) not in paths]
    if as_json:
        render.emit_json({"machine_memory": machine.memory, "models": known, "others": others})
        return
    _print_table(known, _COLUMNS)
    if others:
        render.result("")
        _print_table(others, _OTHERS)
    tested = ", ".join(model["name"] for model in known if model["tested"])
    render.say(f"\nTested with mlxlm: {tested}. The sizes of the others are estimates.", style="dim")
    dtype = ", in float32 if they fit," if machine.device_type == "cpu" else ","
    render.say(f"Memory: the weights{dtype} a cache of 4,096 tokens and its copy, and the program itself.", style="dim")
    render.say("mlxlm chat NAME downloads a model if necessary.", style="dim")


def _print_table(models: Sequence[dict[str, Any]], columns: dict[str, str]) -> None:
    rows = [[_cell(field, model[field]) for field in columns] for model in models]
    render.print_table(rows, list(columns.values()))


def _entry(entry: CatalogEntry, machine: planner.Machine) -> dict[str, Any]:
    fit, local = planner.entry_fit(entry, machine), find_entry(entry)
    source = next((source for source in entry.sources if isinstance(source, HubSource)), None)
    location = local and local.location
    if source and not local and hub.cached_bytes(source.repository):
        location = HUB + INCOMPLETE
    names = ("name", "description", "parameters", "bytes", "license", "restrictions", "context_length", "tested")
    place = {
        "path": local and str(local.path),
        "location": location,
        "revision": source and source.revision,
    }
    return {name: getattr(entry, name) for name in names} | {"memory": fit.memory, "fits": fit.fits} | place


def _bundled(name: str, folder: Path, machine: planner.Machine) -> dict[str, Any]:
    config = load_config(folder)
    fit = planner.chat_fit(config, machine)
    return {
        "name": name,
        "description": "Ships with mlxlm.",
        "parameters": config.parameter_count(),
        "bytes": folder_size(folder),
        "license": "mit",
        "restrictions": None,
        "context_length": config.max_position_embeddings,
        "tested": True,
        "memory": fit.memory,
        "fits": fit.fits,
        "path": str(folder),
        "location": "mlxlm",
        "revision": None,
    }


def _local(model: LocalModel, machine: planner.Machine) -> dict[str, Any]:
    fit = None
    with suppress(MlxlmError):  # the planner knows the architectures of mlxlm's own decoder only
        fit = planner.chat_fit(planner.find_config(model.path), machine)
    facts = {"name": model.name, "path": str(model.path), "bytes": model.bytes, "location": model.location}
    return {**facts, "memory": fit and fit.memory, "fits": fit and fit.fits}


def _cell(field: str, value: Any) -> str:
    if value is None:
        return "-" if field == "location" else "?"
    if field in ("bytes", "memory"):
        return human_bytes(value)
    if field == "parameters":
        return human_count(value)
    return {True: "yes", False: "no"}[value] if field == "fits" else str(value)
