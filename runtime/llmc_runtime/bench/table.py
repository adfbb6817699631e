"""Formats a report as a table of aligned text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A row of the table: its label, the key of its figures, and their format."""

    label: str
    key: str
    form: str


def table(lines: Sequence[Line], columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each of `lines` and a column for each named report; missing figures are shown as dashes."""
    rows = [["", *columns]] if any(columns) else []
    rows += [[line.label, *(_format(column.get(line.key), line.form) for column in columns.values())] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _format(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
