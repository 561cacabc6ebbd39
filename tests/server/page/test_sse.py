"""The parser of server-sent events."""

from __future__ import annotations

STREAM = ": hello\r\ndata: a\r\n\r\ndata:b\ndata: c\n\nevent: x\nid\rdata\rdata: é:\r\r: bye\ndata: unfinished"
EVENTS = [{"comment": "hello"}, {"data": "a"}, {"data": "b\nc"}, {"data": "\né:"}, {"comment": "bye"}]


def test_a_stream_is_parsed_the_same_in_any_pieces(page):
    whole, pieces = page.evaluate(
        """async (stream) => {
          const { SSEParser } = await import("/page/sse.js");
          const parser = new SSEParser();
          return [new SSEParser().push(stream), [...stream].flatMap((character) => parser.push(character))];
        }""",
        STREAM,
    )
    assert whole == pieces == EVENTS
