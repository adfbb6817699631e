"""Patterns of the lines of HTTP messages that match in linear time, for h11.

h11's own patterns divide white space in all possible ways before they reject a line: 30,000 spaces in front of a NUL
take 2.6 s. These match the same lines.
"""

from __future__ import annotations

import re

import h11._abnf as abnf
import h11._readers as readers

_WORD = rf"{abnf.vchar_or_obs_text}++"
_VALUE = rf"(?P<field_value>(?:{_WORD}(?:[ \t]++{_WORD})*+)?)"
HEADER = re.compile(rf"(?P<field_name>{abnf.field_name}):[ \t]*+{_VALUE}[ \t]*+".encode())
CHUNK = re.compile(rf"(?P<chunk_size>{abnf.chunk_size})(?:(?P<chunk_ext>;[^\n]*)|[ \t]*+)\r\n".encode())


def use_linear_patterns() -> None:
    """Replace h11's patterns in this process."""
    readers.header_field_re, readers.chunk_header_re = HEADER, CHUNK
