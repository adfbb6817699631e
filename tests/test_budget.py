"""The budget of docs/budgets.md covers every part of a request; `python tests/test_budget.py` writes its lists."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.admin import AbortRequest, Admin, LevelRequest
from llmc_runtime.server.app import Endpoints
from llmc_runtime.server.http.auth import Limits
from llmc_runtime.server.openapi import description

from tests.budget import COMMON, FIELDS, LIMITS, NONE, ROUTES, Row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "budgets.md"
BEGIN = "<!-- written by tests/test_budget.py: -->"
END = "<!-- end of what tests/test_budget.py writes -->"
MODULE = "llmc_runtime"


def limit(name: str) -> Any:
    """The value of a limit's constant."""
    module, attribute, _ = LIMITS[name]
    found: Any = importlib.import_module(f"{MODULE}.{module}")
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def shown(name: str) -> str:
    """A limit as the page has it."""
    value, unit = limit(name), LIMITS[name][2]
    if unit == "bytes":
        for size, word in ((1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size and value % size == 0:
                return f"{value // size} {word}"
    number = f"{value:,.10g}"
    return f"{number} {unit}".strip()


def filled(text: str) -> str:
    """A text, its limits filled in."""
    return re.sub(r"\{([a-z_]+)\}", lambda match: shown(match[1]), text)


PARTS = ("CPU", "memory", "response", "queue and time")


def wrapped(text: str, indent: int) -> str:
    """An item of a list, in lines of at most 120 columns."""
    lead, joined = " " * indent, re.sub("`[^`]+`", lambda match: match[0].replace(" ", "\0"), text)  # not within code
    more = {"initial_indent": lead + "- ", "subsequent_indent": lead + "  "}
    return textwrap.fill(joined, 120, break_long_words=False, break_on_hyphens=False, **more).replace("\0", " ")


def items(head: str, rows: Sequence[Row], code: bool) -> Iterator[str]:
    """Rows as a list in Markdown, with a heading."""
    yield f"### {head}\n"
    for row in rows:
        names = [f"`{name}`" for name in row.of] if code else row.of
        yield wrapped(", ".join(names), 0)
        for part, text in zip(PARTS, (row.cpu, row.memory, row.answer, row.queue), strict=True):
            if text != NONE:
                yield wrapped(f"{part}: {filled(text)}", 4)
        yield wrapped(f"modules: {', '.join(f'`{name}`' for name in row.where)}", 4)
    yield ""


def lists() -> str:
    """Return the text between BEGIN and END."""
    lines = [BEGIN, "", *items("Every request", COMMON, False), *items("Routes", ROUTES, True)]
    return "\n".join([*lines, *items("Parameters and fields", FIELDS, True), END])


def routes(document: Mapping[str, Any]) -> set[str]:
    """ "METHOD PATH" of everything that is described, and of all that is routed."""
    found = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    made: Any = [*Endpoints(None, Limits()).routes(), *Admin(None, Limits()).routes()]  # type: ignore[arg-type]
    for route in made:
        path = route.path.replace(":path}", "}")
        path = path.rstrip("/") or "/"
        found |= {f"{method} {path}" for method in route.methods - {"HEAD"}}
    return found


def fields(document: Mapping[str, Any]) -> set[str]:
    """Every parameter as "header NAME" and so on, every field of every body by its path."""
    found: set[str] = set()

    def resolved(one: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in one:
            part: Any = document
            for name in one["$ref"].removeprefix("#/").split("/"):
                part = part[name]
            one = part
        return one

    def walk(schema: Mapping[str, Any], path: str) -> None:
        schema = resolved(schema)
        for one in schema.get("anyOf", ()):
            walk(one, path)
        if isinstance(schema.get("items"), dict):
            walk(schema["items"], f"{path}[]")
        for name, one in schema.get("properties", {}).items():
            inner = f"{path}.{name}" if path else name
            found.add(inner)
            walk(one, inner)

    for methods in document["paths"].values():
        for operation in methods.values():
            found.update(f"{one['in']} {one['name']}" for one in map(resolved, operation.get("parameters", ())))
            for kind in operation.get("requestBody", {}).get("content", {}).values():
                walk(kind["schema"], "")
    kinds = (AbortRequest, LevelRequest)  # of routes that the description leaves out
    return found | {"query seconds"} | {name for kind in kinds for name in kind.__struct_fields__}


def missing(document: Mapping[str, Any]) -> set[str]:
    """Return the fields without a row."""
    rows = {one for row in (*ROUTES, *FIELDS) for one in row.of}
    return (routes(document) | fields(document)) - rows


def test_every_route_parameter_and_field_has_a_budget() -> None:
    document = msgspec.json.decode(msgspec.json.encode(description()))
    assert missing(document) == set()
    rows = [one for row in (*ROUTES, *FIELDS) for one in row.of]
    assert len(rows) == len(set(rows)), "a field has two rows"
    assert set(rows) - routes(document) - fields(document) == set(), "a row is about nothing that there is"


@pytest.mark.parametrize("place", ["field", "nested", "parameter", "route"])
def test_a_field_without_a_budget_is_found(place: str) -> None:
    document = copy.deepcopy(description())
    schemas, extra = document["components"]["schemas"], {"type": "string"}
    operation = document["paths"]["/tokenize"]["post"]
    if place == "field":
        schemas["ChatRequest"]["properties"]["new"] = extra
    elif place == "nested":
        schemas["JsonSchema"]["properties"]["new"] = {"type": "array", "items": {"properties": {"deep": extra}}}
    elif place == "parameter":
        operation["parameters"] = [*operation["parameters"], {"name": "new", "in": "query", "schema": extra}]
    else:
        document["paths"]["/new"] = {"get": {"responses": {}}}
    path = "response_format.json_schema.new"
    expected = {"field": {"new"}, "nested": {path, f"{path}[].deep"}, "parameter": {"query new"}, "route": {"GET /new"}}
    assert missing(document) == expected[place]


def test_modules_and_limits_of_rows_exist() -> None:
    for row in (*COMMON, *ROUTES, *FIELDS):
        assert row.where and row.of and all((row.cpu, row.memory, row.answer, row.queue)), row.of
        for module in row.where:
            assert importlib.util.find_spec(f"{MODULE}.{module}") is not None, (row.of, module)
        names = {
            name for cell in (row.cpu, row.memory, row.answer, row.queue) for name in re.findall(r"\{(\w+)\}", cell)
        }
        assert names <= LIMITS.keys(), row.of
    used = {
        n
        for row in (*COMMON, *ROUTES, *FIELDS)
        for n in re.findall(r"\{(\w+)\}", f"{row.cpu}{row.memory}{row.answer}{row.queue}")
    }
    assert used == LIMITS.keys(), "a limit that no row names"
    for name in LIMITS:
        value = limit(name)
        assert isinstance(value, int | float) and not isinstance(value, bool) and value > 0, name


def test_the_page_has_the_budget_and_the_numbers_of_the_constants() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    written = page[page.index(BEGIN) : page.index(END) + len(END)]
    assert written == lists(), "run: python tests/test_budget.py"


def test_sizes_are_shown_in_their_units() -> None:
    assert shown("body") == "8 MiB" and shown("stop_bytes") == "1 KiB" and shown("messages") == "4,096"
    assert shown("timeout") == "1,000,000 s" and shown("body_seconds") == "30 s"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(BEGIN)] + lists() + text[text.index(END) + len(END) :], encoding="utf-8")
