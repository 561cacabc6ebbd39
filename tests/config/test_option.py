"""Options as fields of a settings class: what is valid, in words, and by default."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlxlm.config.option import default_text, option, options_of, range_problems, valid_text


@dataclass(frozen=True)
class Settings:
    share: float = option(0.5, "Share.", low=0, below=1)
    part: float | None = option(None, "Part.", above=0, high=1, default_text="all")
    count: int = option(3, "Count.", low=1)
    bits: int | None = option(None, "Bits.", choices=(4, 8))
    kind: str = option("a", "Kind.", choices=("a", "b"))
    name: str = option("", "Name.")
    is_on: bool = option(False, "On.")
    texts: tuple[str, ...] = option(("x",), "Texts.")
    level: float = option(0.0, "Level.", low=5, high=9, also=0, valid="0, or 5 to 9")
    other: object = None


@pytest.mark.parametrize(
    ("name", "valid", "invalid", "text"),
    [
        ("share", [0, 0.99], [-0.1, 1, None, "0", True, float("nan"), float("inf")], "a number from 0 to below 1"),
        ("part", [None, 1, 1e-300], [0, 1.1], "a number above 0 and at most 1"),
        ("count", [1, 2**53 - 1], [0, 1.0, True, 2**53, None], "a whole number from 1 up"),
        ("bits", [None, 4, 8], [5, True, "4"], "one of 4, 8"),
        ("kind", ["b"], ["c", None, 1], "one of a, b"),
        ("name", ["", "\u00e9"], [None, 1, "\udcff"], "text"),
        ("is_on", [True], [None, 1, "on"], "true or false"),
        ("level", [0, 5, 9], [4.9, 9.1], "0, or 5 to 9"),
    ],
)
def test_ranges(name, valid, invalid, text):
    assert valid_text(options_of(Settings)[name]) == text
    for value in valid:
        assert not list(range_problems(Settings(**{name: value}))), value
    for value in invalid:
        assert list(range_problems(Settings(**{name: value}))) == [f"{name} is {value!r}, it must be {text}"]


def test_texts():
    assert list(range_problems(Settings(texts=("a", 1, "")))) == [
        "texts has 1, it must be text of one character or more"
    ]
    assert list(range_problems(Settings(texts=("", "\udcff")))) == [
        "texts has '', it must be text of one character or more"
    ]
    assert list(range_problems(Settings(texts=("\udcff",)))) == [r"texts has '\udcff', which UTF-8 can't encode"]


def test_all_problems_and_defaults():
    assert len(list(range_problems(Settings(share=2, count=0, kind="c", other=3)))) == 3
    texts = {name: default_text(field) for name, field in options_of(Settings).items()}
    assert texts == {
        "share": "0.5", "part": "all", "count": "3", "bits": None, "kind": "a", "name": None, "is_on": None,
        "texts": None, "level": "0.0",
    }  # fmt: skip
