"""Stop strings: the same cut however the text is split up, and nothing of a stop string shown."""

from hypothesis import given
from hypothesis import strategies as st

from mlxlm.generation.text import StopStrings

letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def cut(text, stops):
    """The text before the stop string that is completed first; the longest of those, if several are."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@given(letters, stop_lists, st.lists(st.integers(1, 5)))
def test_text_before_the_stop_string(text, stops, sizes):
    matcher = StopStrings(stops)
    wanted = cut(text, stops)
    emitted, flush = "", text
    for size in [*sizes, len(text) + 1]:
        emitted += matcher.push(flush[:size])
        flush = flush[size:]
        assert wanted.startswith(emitted)
    assert matcher.matched == (wanted != text)
    assert emitted + matcher.flush() == wanted


@given(letters, stop_lists)
def test_only_the_start_of_a_stop_string_is_buffered(text, stops):
    matcher = StopStrings(stops)
    held = text[len(matcher.push(text)) :]
    assert matcher.matched or not held or any(stop.startswith(held) and stop != held for stop in stops)
