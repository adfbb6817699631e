"""Patterns of header lines and of lines before chunks: the same lines as h11's match, in linear time."""

from __future__ import annotations

import re
from random import Random

import pytest

pytest.importorskip("starlette")
import h11
import h11._abnf as abnf
from draw import of_test
from llmc_runtime.server.http.parser_limits import CHUNK, HEADER
from llmc_runtime.server.protocol import HttpConnection

PIECES = {  # our pattern, h11's, the pieces of drawn lines, their likely beginning, and their end
    "header": (
        HEADER,
        abnf.header_field,
        (b"X", b"y-1", b":", b" ", b"\t", b"a", b"\xe9", b"\0", b"\v", b"\r", b"\x01"),
        b"X:",
        b"",
    ),
    "chunk": (
        CHUNK,
        abnf.chunk_header,
        (b"5", b"fF", b"g", b";", b" ", b"\t", b"a=b", b"\0", b"\r", b"\n", b"\r\n"),
        b"5",
        b"\r\n",
    ),
}


@pytest.mark.parametrize("kind", PIECES)
def test_they_match_what_the_patterns_of_h11_match(kind: str) -> None:
    """Random lines, of which some are valid, have the same named parts."""
    ours, theirs, pieces, first, end = PIECES[kind]
    pattern, draw, matched = re.compile(theirs.encode()), Random(of_test()), 0
    for _ in range(20_000):
        line = b"".join(draw.choices(pieces, k=draw.randint(1, 9)))
        line = (first if draw.random() < 0.7 else b"") + line + end
        found, expected = ours.fullmatch(line), pattern.fullmatch(line)
        assert (found and found.groupdict()) == (expected and expected.groupdict()), line
        matched += found is not None
    assert 1000 < matched < 19_000


@pytest.mark.parametrize("line", [b"X:%b\0\r\n", b"X: a%b\0\r\n", b"X:%b\x0b\r\n"])
def test_long_malformed_lines_are_refused(line: bytes) -> None:
    """With h11's pattern, 400,000 spaces take eight minutes."""
    assert HttpConnection  # its module replaces the patterns
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n" + line % (b" " * 400_000) + b"\r\n")
    with pytest.raises(h11.RemoteProtocolError, match="illegal header line"):
        connection.next_event()


def test_long_malformed_lines_before_chunks_are_refused() -> None:
    """A bare line feed, which does not end a chunk header, follows the spaces."""
    assert HttpConnection
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.next_event()
    connection.receive_data(b"5;" + b" " * 400_000 + b"\nX\r\nabcde\r\n")
    with pytest.raises(h11.RemoteProtocolError, match="illegal chunk header"):
        connection.next_event()
