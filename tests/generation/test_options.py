"""Options: all problems are reported at once; accepted forms of a value."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.generation import GenerationOptions, Sampler
from mlxlm.utils.errors import GenerationError


def test_all_problems_are_reported_at_once():
    wrong = {
        "temperature": -1,
        "top_k": -2,
        "top_p": 0,
        "min_p": 2,
        "typical_p": 0,
        "xtc_probability": 2,
        "xtc_threshold": 0,
        "repetition_penalty": 0,
        "repetition_context_size": 0,
        "presence_penalty": 1e9,
        "frequency_penalty": "1",
        "dry_multiplier": -1,
        "dry_base": 0,
        "dry_allowed_length": 0,
        "dry_penalty_last_n": 2**40,
        "seed": -1,
        "deterministic": 1,
        "logprobs": -1,
        "max_tokens": 0,
        "regex": "",
    }
    with pytest.raises(GenerationError) as caught:
        GenerationOptions(**wrong)
    for name in wrong:
        assert f"{name} is " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-9},
        {"temperature": "1"},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": float("nan")},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": float("inf")},
        {"seed": 2**64},
        {"typical_p": 1.5},
        {"xtc_probability": None},
        {"dry_sequence_breakers": ("", "x")},
        {"dry_sequence_breakers": (1,)},
        {"dry_sequence_breakers": None},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: -1e9}},
        {"logit_bias": ["3"]},
        {"logit_bias": ["3=x"]},
        {"logit_bias": 3},
        {"logprobs": 10**6},
        {"json_schema": "{"},
        {"json_schema": "[]"},
        {"json_schema": 3},
        {"json_schema": {1: object()}},
        {"json_schema": {"const": float("nan")}},
        {"json_schema": '{"const": NaN}'},
        {"json_schema": '{"const": 1e400}'},
        {"json_schema": '{"const": 1' + "0" * 400 + "}"},
        {"json_schema": '{"const": "\\ud83d"}'},
        {"regex": 3},
        {"regex": "a" * 2**21},
        {"grammar": ""},
        {"grammar": 3},
        {"grammar": "a" * 2**21},
        {"choice": ("",)},
        {"choice": (None,)},
        {"choice": None},
        {"logit_bias": None},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": ["5=1", "5=-100"]},
        {"logit_bias": {"5": 1, 5: 3}},
        {"top_k": np.float32(1.5)},
    ],
)
def test_invalid_values(setting):
    with pytest.raises(GenerationError, match=next(iter(setting))) as caught:
        GenerationOptions(**setting)
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
        ({"choice": (1, 2)}, "choice has 1, it must be text"),
        ({"dry_sequence_breakers": None}, "dry_sequence_breakers has None, it must be text"),
        ({"logit_bias": None}, "logit_bias is None"),
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


def test_unknown_options_are_refused():
    with pytest.raises(GenerationError, match="there is no option temprature"):
        GenerationOptions.of(temprature=1)
