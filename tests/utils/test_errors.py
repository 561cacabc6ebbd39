"""Errors say where they happened, and keep what they know."""

import pytest

from mlxlm.utils.errors import CheckpointError, ConfigError, DeviceError, MlxlmError, TextTooLongError

LOST = DeviceError("lost", "again", out_of_memory=True, results_lost=False)


@pytest.mark.parametrize(
    ("error", "error_type", "text"),
    [
        (ConfigError("missing hidden_size"), None, "a/b.json: missing hidden_size"),
        (ConfigError("no x", "y", is_operator_hint=True), CheckpointError, "a/b.json: no x (try: y)"),
        (TextTooLongError(8), None, "a/b.json: the text has more than 8 tokens (try: a shorter one)"),
        (LOST, None, "a/b.json: lost (try: again)"),
    ],
)
def test_prefixed(error: MlxlmError, error_type, text):
    before = str(error)
    copy = error.prefixed("a/b.json", error_type)
    assert type(copy) is (error_type or type(error)) and str(copy) == text and repr(text.split(" (")[0]) in repr(copy)
    assert {**vars(copy), "message": None} == {**vars(error), "message": None} and str(error) == before


def test_a_prefix_is_one_printable_line():
    assert str(ConfigError("bad").prefixed("a\n\x1b[31m")) == "a \\x1b[31m: bad"
    assert len(str(ConfigError("x" * 3000).prefixed("y" * 3000))) < 2100
