"""Options: all problems are reported at once; accepted forms of a value."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.config.option import options_of, types_of
from mlxlm.generation import GenerationOptions, Sampler
from mlxlm.utils.errors import GenerationError

NUMBERS = [name for name, field in options_of(GenerationOptions).items() if types_of(field)[0] in ("int", "float")]


def test_all_problems_are_reported_at_once():
    with pytest.raises(GenerationError) as caught:
        GenerationOptions(**dict.fromkeys(NUMBERS, -1000), deterministic=1, regex="")
    for name in (*NUMBERS, "deterministic", "regex"):
        assert f"{name} is " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), -1e9])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_a_text_or_infinite(name, value):
    with pytest.raises(GenerationError, match=f"{name} is .*, it must be "):
        GenerationOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("temperature", [0, 0.001, 100], [1e-9, 101]),
        ("top_k", [0, 10**6], [-1, 1.5, np.float32(1.5)]),
        ("top_p", [1e-9, 1], [0, 1.1]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("repetition_penalty", [0.01, 100], [0]),
        ("dry_base", [1], [0.9]),
        ("dry_penalty_last_n", [1, 1 << 14], [0, 2**40]),
        ("presence_penalty", [-100, 100], [101]),
        ("seed", [None, 0, 2**64 - 1], [2**64, -1, 0.5]),
        ("logprobs", [None, 0, 1000], [1001]),
        ("max_tokens", [None, 1], [0]),
        ("xtc_probability", [0, 1], [None, 2]),
        ("deterministic", [None, True], ["yes"]),
        ("dry_sequence_breakers", ["", [""], ["x"]], [("", "x"), (1,), None]),
        ("logit_bias", [{}], [{-1: 0.0}, {"x": 1.0}, {1: float("nan")}, {1: -1e9}, ["3"], ["3=x"], 3, None]),
        ("logit_bias", [{2: 1}], [["5=1", "5=-100"], {"5": 1, 5: 3}, {1.5: 1.0}]),
        ("regex", ["a"], [3, "a" * 2**21]),
        ("grammar", ["start: \"a\""], ["", 3, "a" * 2**21]),
        ("choice", [["a"]], [("",), (None,), None, ["a" * 2**21]]),
        ("json_schema", [True, {}, "{}"], ["{", "[]", 3, {1: object()}, {"const": float("nan")}, '{"const": NaN}']),
        ("json_schema", [], ['{"const": 1e400}', '{"const": 1' + "0" * 400 + "}", '{"const": "\\ud83d"}']),
    ],
)  # fmt: skip
def test_ranges(name, valid, invalid):
    for value in valid:
        GenerationOptions(**{"temperature": 0.5, name: value})
    for value in invalid:
        with pytest.raises(GenerationError, match=name) as caught:
            GenerationOptions(**{name: value})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": 0, "typical_p": 0.9}, "typical_p needs a temperature above 0"),
        ({"temperature": 0, "xtc_probability": 0.5}, "xtc_probability needs a temperature above 0"),
        ({"regex": "a", "choice": "b"}, "regex and choice exclude each other"),
        ({"json_schema": True, "grammar": "b"}, "json_schema and grammar exclude each other"),
        ({"stop": ("",)}, "stop has '', it must be text of one character or more"),
        ({"choice": ("a", "\udcff")}, "choice has '.udcff', which UTF-8 can't encode"),
        ({"regex": "\udcff"}, "regex is '.udcff', "),
        ({"logit_bias": ["5=1", "6=1", "5=-100"]}, "logit_bias has the token 5 twice"),
        ({"json_schema": [1]}, r"not a JSON schema: it is \[1\]"),
        ({"json_schema": '{"type": NaN}'}, "it has NaN, which is not a finite number"),
        ({"json_schema": '{"const": "\\ud83d"}'}, "it has half of a surrogate pair"),
    ],
)
def test_messages_of_invalid_values(setting, message):
    with pytest.raises(GenerationError, match=message):
        GenerationOptions(**setting)


def test_accepted_forms_of_values():
    """JSON has ids as texts and lists for tuples; the shell has everything as text."""
    biases = {5: -100.0, 7: 2.5}
    for given in (biases, {"5": -100.0, "7": "2.5"}, ["5=-100", "7=2.5"], ("5=-1e2", "7=2.5")):
        assert GenerationOptions(logit_bias=given).logit_bias == biases
    assert GenerationOptions(choice="yes").choice == GenerationOptions(choice=["yes"]).choice == ("yes",)
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert json.loads(GenerationOptions(json_schema=schema).json_schema) == schema
    assert GenerationOptions(json_schema=schema).constraint == "json_schema"
    assert GenerationOptions(json_schema=True).json_schema == "true"
    assert GenerationOptions().constraint is None
    assert (
        GenerationOptions(dry_sequence_breakers="").dry_sequence_breakers
        == GenerationOptions(dry_sequence_breakers=[""]).dry_sequence_breakers
        == ()
    )


def test_numpy_numbers_are_accepted():
    options = GenerationOptions(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(5): np.float32(1)})
    assert options == GenerationOptions(temperature=0.5, top_k=3, logit_bias={5: 1.0})
    assert type(options.temperature) is float and type(options.top_k) is int and type(*options.logit_bias) is int


@pytest.mark.parametrize("name", [f.name for f in fields(GenerationOptions) if isinstance(f.default, int | float)])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30])
def test_large_numbers_are_refused_or_work(name, value):
    try:
        options = GenerationOptions.of(**{"dry_multiplier": 1.0, "dry_sequence_breakers": (), name: value})
    except GenerationError as error:
        assert name in str(error)
        return
    assert Sampler(options, [1, 2], 0)(mx.zeros((1, 8))).item() >= 0


def test_options_survive_a_file_of_json():
    options = GenerationOptions(
        logit_bias={5: -1.0}, json_schema={"type": "null"}, dry_sequence_breakers=("x",), logprobs=3
    )
    assert GenerationOptions.of(**json.loads(json.dumps(asdict(options)))) == options
