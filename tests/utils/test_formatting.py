"""Numbers and text as people read them."""

import pytest

from mlxlm.utils.formatting import (
    group_layers_by_value,
    human_bytes,
    human_count,
    human_flops,
    human_seconds,
    printable,
)


@pytest.mark.parametrize(
    ("n", "bytes", "count"),
    [
        (0, "0 B", "0"), (7, "7 B", "7"), (999, "999 B", "999"), (999.6, "1 kB", "1k"), (1234, "1.23 kB", "1.23k"),
        (999_600, "1 MB", "1M"), (1_234_567_890, "1.23 GB", "1.23B"), (5.2e12, "5.2 TB", "5.2T"),
        (3e18, "3000 PB", "3000000T"), (-1234, "-1.23 kB", "-1.23k"),
    ],
)  # fmt: skip
def test_three_digits_and_a_unit(n, bytes, count):
    assert (human_bytes(n), human_count(n)) == (bytes, count)


def test_control_characters_are_replaced():
    assert printable("a\x1b[31m\x07\x9b\r\u202e\u2066\tb\n") == "a\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffd\tb\n"


def test_seconds():
    said = [human_seconds(s) for s in (-1, 0.4, 59.6, 75, 3599.6, 7325)]
    assert said == ["0s", "0s", "1m00s", "1m15s", "1h00m", "2h02m"]


def test_operations_in_a_second():
    assert [human_flops(n) for n in (0, 104e9, 312e12)] == ["0 FLOP/s", "104 GFLOP/s", "312 TFLOP/s"]


def test_group_layers_by_value():
    layers = {"model.layers.0.mlp": 4, "model.layers.1.mlp": 4, "model.layers.1.attn": 8, "lm_head": 4}
    assert group_layers_by_value(layers) == {4: "model.layers.*.mlp, lm_head", 8: "model.layers.*.attn"}
