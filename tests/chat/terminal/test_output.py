"""Output without control characters."""

from mlxlm.chat.terminal import output


def test_control_characters_are_replaced():
    assert output.printable("a\x1b[31m\x07\x9b\r\u202e\u2066\tb\n") == "a\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffd\tb\n"
