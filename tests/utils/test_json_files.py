"""JSON is read from untrusted files, and written so that any reader accepts it."""

import json

import pytest

from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.json_files import json_line, parse_json, parse_json_object, read_json, read_json_object, write_json


def test_a_file_or_the_config_of_a_folder(tmp_path):
    write_json(tmp_path / "config.json", {"é": [1, None]})
    assert read_json(tmp_path) == read_json(tmp_path / "config.json") == {"é": [1, None]}
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "bom.json") == {}
    with pytest.raises(ConfigError, match="none.json does not exist"):
        read_json(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="config.json has 34 B, the limit is 9 B"):
        read_json_object(tmp_path / "config.json", 9, CheckpointError)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "nan.json", float("nan"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "x is not JSON: Expecting property name .* at character 2 .try: y"),
        (b'"\xff"', "x is not UTF-8: invalid start byte at byte 1"),
        (b"[" * 100_000, "x can't be read: maximum recursion depth"),
        (b"1" * 10_000, "x can't be read: Exceeds the limit"),
    ],
)
def test_what_is_not_json(content, message):
    for strict in (False, True):
        with pytest.raises(ConfigError, match=message):
            parse_json(content, "x", ConfigError, "y", strict=strict)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', 'x has "b" twice'),
        (b'{"a": NaN}', "x has NaN, which is not a JSON value"),
        (b'{"a": -1e999}', "x has -1e999, which is too large for a number"),
        (b'{"a": -Infinity}', "x has -Infinity"),
        (b"[1]", "x is not a JSON object"),
    ],
)
def test_what_parsers_treat_differently_is_refused(content, message):
    parse_json(content, "x", ConfigError)
    with pytest.raises(ConfigError, match=message):
        parse_json_object(content, "x", ConfigError)


def test_a_line_is_safe_for_a_terminal():
    value = {"text": "é\x1b[2J\n\x9b\u2028\udcff"}
    line = json_line(value)
    assert line == '{"text": "é\\u001b[2J\\n\\u009b\\u2028\\udcff"}\n'.encode()
    assert json.loads(line) == value
