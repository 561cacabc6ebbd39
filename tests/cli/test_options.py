"""The options of all commands: sections, names, defaults in help texts, checks of combinations."""

import inspect
import re
from contextlib import contextmanager

import click
import pytest
from click.testing import CliRunner

from mlxlm.cli.main import COMMANDS, _run, app
from mlxlm.cli.options import SHOW_ALL, SIZE, SectionedCommand, allow_sleep_option, option, reject_unused_options
from mlxlm.utils.errors import GenerationError


def leaf_commands():
    commands = []
    for name in COMMANDS:
        command = app.get_command(None, name)
        for child in getattr(command, "commands", {"": command}).values():
            commands.append(pytest.param(child, id=f"{name} {child.name}" if child is not command else name))
    return commands


@pytest.mark.parametrize("command", leaf_commands())
def test_help_fits_a_terminal_and_every_option_is_explained(command):
    context = click.Context(command, terminal_width=80)
    lines = command.get_help(context).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 50
    context.meta[SHOW_ALL] = True
    text = command.get_help(context)
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert not [p.opts for p in shown if p.opts[-1] not in text]
    for parameter in shown:
        assert re.search(r"[.\]:] ?$", parameter.help) or "  [default" in parameter.help, parameter.opts


def test_commands_that_take_long_keep_the_machine_awake(monkeypatch):
    """Until they end, unless --allow-sleep is given."""
    held = []

    @contextmanager
    def prevent_sleep():
        held.append("awake")
        yield
        held.append("may sleep")

    monkeypatch.setattr("mlxlm.cli.options.prevent_sleep", prevent_sleep)
    command = click.command()(allow_sleep_option("Power")(lambda: held.append("works")))
    assert CliRunner().invoke(command, []).exit_code == 0 and held == ["awake", "works", "may sleep"]
    assert CliRunner().invoke(command, ["--allow-sleep"]).exit_code == 0 and held[3:] == ["works"]
    names = {p.id for p in leaf_commands() if any(o.name == "allow_sleep" for o in p.values[0].params)}
    experiments = {"scaling", "sweep", "compare-architectures", "speedrun"}
    training = {"pretrain", "finetune", "grpo", "quickstart", "models verify"}
    assert names == experiments | training | {"draft", "serve", "quantize"}


@pytest.mark.parametrize("text, size", [("2.0GB", 2 * 10**9), ("900 mb", 9 * 10**8), ("1.5GiB", 3 * 2**29), ("7", 7)])
def test_sizes(text, size):
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("command", leaf_commands())
def test_every_option_is_a_parameter_of_its_function(command):
    signature = inspect.signature(inspect.unwrap(command.callback)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in signature.values()):
        return
    names = {parameter.name for parameter in command.params if parameter.expose_value}
    assert names == set(signature)


@pytest.fixture
def command():
    @click.command(cls=SectionedCommand)
    @option("Second", "--two-parts", click.IntRange(1), "Two.")
    @option("First", "-o --one", str, "One.")
    @click.option("--other", is_flag=True, help="Other.")
    def command(**options):
        reject_unused_options(options, (options["other"], ["one", "two_parts"], "--other is given"))

    return command


def test_sections_are_in_order_of_appearance_and_others_last(command):
    text = CliRunner().invoke(command, ["--help"]).output
    assert text.index("Second:") < text.index("First:") < text.index("Options:") < text.index("--other")


def test_unused_options_are_named_as_typed(command):
    result = CliRunner().invoke(command, ["--other", "--two-parts", "1", "-o", "x"])
    assert result.exit_code == 2
    assert "--one and --two-parts would have no effect: --other is given" in " ".join(result.output.split())
    assert CliRunner().invoke(command, ["--two-parts", "1"]).exit_code == 0


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("`key_bits=8`, or no `keep`", "--kv-bits 8, or no --kv-keep"),
        ("`temp=0` or `learning_rate`", "`temp=0` or `learning_rate`"),
        ("`deterministic=True`", "--deterministic"),
    ],
)
def test_errors_name_options(hint, shown, monkeypatch, capsys):
    def fail(*args, **options):
        raise GenerationError("no memory", hint)

    monkeypatch.setattr("mlxlm.cli.generation_options.fetch", fail)
    assert _run(["generate", "model", "--prompt", "Hello"]) == 1
    assert capsys.readouterr().err == f"error: no memory (try: {shown})\n"
    assert str(GenerationError("no memory", hint)) == f"no memory (try: {hint})"
