"""The sampling options set the fields of GenerationOptions."""

from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from mlxlm.cli.generation_options import sampling_options
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import GenerationError

OPTION_NAMES = {"dry_sequence_breakers": "--dry-sequence-breaker"}


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


def test_every_option_sets_its_field(shell, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('\ufeff{"type": "null"}', encoding="utf-8")
    given = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "xtc_threshold": 0.2,
        "repetition_penalty": 1.2,
        "repetition_context_size": 9,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "dry_multiplier": 0.7,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 99,
        "dry_sequence_breakers": ("\n", ";"),
        "logit_bias": {3: -1.0, 4: 2.0},
        "logprobs": 2,
        "seed": 8,
        "deterministic": True,
        "max_tokens": 5,
        "stop": ("a", "b"),
    }
    texts = {"logit_bias": ["3=-1", "4=2"]}
    arguments = []
    for name, value in given.items():
        for one in texts.get(name, value if isinstance(value, tuple) else [value]):
            option = OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
            arguments += [option] if one is True else [option, str(one)]
    assert shell(*arguments) == GenerationOptions(**given)
    assert shell("--json-schema", str(schema)) == GenerationOptions(json_schema='{"type": "null"}')
    assert shell("--json-schema", ' {"a": 1}').json_schema == ' {"a": 1}'
    assert shell("--regex", "a+").regex == "a+"
    assert shell("--choice", "a", "--choice", "{b").choice == ("a", "{b")
    (schema.parent / "lark").write_text("start: yes\nyes: 'a'")
    assert shell("--grammar", str(schema.parent / "lark")).grammar == "start: yes\nyes: 'a'"
    assert shell("--grammar", '// c\n start [lazy]: "a"').grammar == '// c\n start [lazy]: "a"'
    assert set(given) | {"json_schema", "regex", "choice", "grammar"} == {f.name for f in fields(GenerationOptions)}
    assert shell("--no-deterministic") == GenerationOptions(deterministic=False) != shell() == GenerationOptions()


def test_unreadable_schemas(shell, tmp_path):
    latin, large = tmp_path / "latin", tmp_path / "large"
    latin.write_bytes(b'{"title": "\xe9"}')
    large.write_bytes(b" " * (2**20 + 1))
    for given, said in (
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path), "is not a regular file"),
        (str(latin), "is not UTF-8"),
        (str(large), "the limit is 262144"),
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
