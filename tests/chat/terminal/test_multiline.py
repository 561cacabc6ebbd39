"""Messages of several lines."""

from mlxlm.chat.terminal.multiline import has_open_block, quote_message, strip_block


def test_what_is_typed_for_a_message():
    for message in ("Hello", "/etc?", " /x", '"""', 'say """', '"""a"""', "\n/a\n"):
        line = quote_message(message)
        assert not has_open_block(line) and not line.startswith("/") and strip_block(line) == message
    assert has_open_block('/system """a') and has_open_block('/edit """\nb') and not has_open_block('/load """a')
    assert not has_open_block('/system """a"""')


def test_blocks():
    assert has_open_block('"""') and has_open_block('"""a\nb') and has_open_block('""""')
    assert not has_open_block('"""a"""') and not has_open_block('say """') and not has_open_block("")
    assert strip_block('"""\na\n b\n"""') == "a\n b"
    assert strip_block('"""a"""') == "a" and strip_block('plain """') == 'plain """'
