"""Arguments of a wrong kind: one line that says what would work, and no exception of Python's."""

import numpy as np
import pytest

from mlxlm.generation import Context, GenerationOptions, generate, score, stream
from mlxlm.utils.errors import GenerationError


@pytest.mark.parametrize("prompt", [None, 3, 1.5, ["a"], [1.5], ["a", 3], [[3]]])
def test_prompts(lm, prompt):
    with pytest.raises(GenerationError, match="neither a text nor a list of ids"):
        stream(lm, prompt)


def test_integers_of_numpy_are_ids(lm):
    wanted = generate(lm, [3, 4], temperature=0, max_tokens=3)
    assert generate(lm, np.array([3, 4]), temperature=0, max_tokens=3).tokens == wanted.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv": "8"}, r"kv is '8' \(try: mlxlm.cache.KVOptions"),
        ({"speculation": "lookup"}, r"speculation is 'lookup' \(try: SpeculativeDecoder\(PromptLookup\(\)\)"),
        ({"lookup": True}, r"there is no option lookup \(try: one of context, kv, speculation, temperature"),
    ],
)
def test_settings(lm, arguments, message):
    with pytest.raises(GenerationError, match=message):
        stream(lm, "a", **arguments)


def test_what_takes_them(lm):
    with pytest.raises(GenerationError, match="kv is 8"):
        Context(lm.model, 8)
    with pytest.raises(GenerationError, match="must be strings"):
        score(lm, [1, 2])


def test_a_length_beyond_what_the_device_counts(lm):
    with pytest.raises(GenerationError, match="dry_allowed_length is 2147483648"):
        GenerationOptions(dry_multiplier=1, dry_allowed_length=2**31)
