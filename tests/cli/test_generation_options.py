"""The sampling options set the fields of GenerationOptions."""

import click
import pytest
from click.testing import CliRunner

from mlxlm.cli.generation_options import sampling_options
from mlxlm.cli.options import flags_of
from mlxlm.config.option import declaration, options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import GenerationError


@pytest.fixture
def shell():
    """`shell(*arguments)`: the GenerationOptions that a command gets, or the error."""
    got = []

    @click.command()
    @sampling_options()
    def command(options):
        got.append(options)

    def shell(*arguments):
        result = CliRunner().invoke(command, arguments)
        if result.exception:
            return result.exception if isinstance(result.exception, GenerationError) else result.output
        return got[-1]

    return shell


TEXTS = {  # of values that aren't written as numbers, with the values
    "logit_bias": (["3=-1", "4=2"], {3: -1.0, 4: 2.0}),
    "json_schema": ([' {"a": 1}'], ' {"a": 1}'),
    "grammar": (['// c\n start [lazy]: "a"'], '// c\n start [lazy]: "a"'),
}


@pytest.mark.parametrize("name", options_of(GenerationOptions))
def test_every_option_sets_its_field(shell, name):
    field = options_of(GenerationOptions)[name]
    flag = flags_of(field)[-1].partition("/")[0]
    kind = types_of(field)[0]
    numbers = [3, 9, 0.25] if kind == "int" else [0.25, 2.5]
    if name in TEXTS:
        texts, value = TEXTS[name]
    elif kind == "bool":
        texts, value = None, True
    elif kind in ("int", "float"):
        value = next(n for n in numbers if declaration(field).accepts_number(n))
        texts = [str(value)]
    else:
        texts = ["\n", "{b"] if kind.startswith("tuple") else ["a+"]
        value = tuple(texts) if kind.startswith("tuple") else texts[0]
    arguments = [flag] if texts is None else [word for text in texts for word in (flag, text)]
    assert shell(*arguments) == GenerationOptions(**{name: value}) != GenerationOptions() == shell()


def test_constraints_from_files(shell, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "lark"
    schema.write_text('\ufeff{"type": "null"}', encoding="utf-8")
    grammar.write_text("start: yes\nyes: 'a'")
    assert shell("--json-schema", str(schema)) == GenerationOptions(json_schema='{"type": "null"}')
    assert shell("--grammar", str(grammar)).grammar == "start: yes\nyes: 'a'"
    assert shell("--no-deterministic") == GenerationOptions(deterministic=False)


def test_unreadable_schemas(shell, tmp_path):
    latin, large = tmp_path / "latin", tmp_path / "large"
    latin.write_bytes(b'{"title": "\xe9"}')
    large.write_bytes(b" " * (2**20 + 1))
    for given, said in (
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path), "is not a regular file"),
        (str(latin), "is not UTF-8"),
        (str(large), "the limit is 262 kB"),
        ('{"type": ', "json_schema is not a JSON schema"),
    ):
        assert said in str(shell("--json-schema", given))


def test_without_some_options():
    got = []

    @click.command()
    @sampling_options(without=["logprobs", "json_schema"])
    def command(options):
        got.append(options)

    assert CliRunner().invoke(command, ["--top-k", "4"]).exit_code == 0 and got == [GenerationOptions(top_k=4)]
    assert CliRunner().invoke(command, ["--logprobs", "1"]).exit_code == 2
    assert "--json-schema" not in CliRunner().invoke(command, ["--help"]).output
