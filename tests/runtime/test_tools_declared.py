"""A call format is one declaration: its reader and its grammar come from it, also when a package brings it."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import Grammars
from llmc_runtime.server.server_options import CALL_FORMATS
from llmc_runtime.server.tool_calls.definitions import tools_of
from llmc_runtime.server.tool_calls.json_shape import Json, JsonShape, Optional, Word
from llmc_runtime.server.tool_calls.message_shape import MessageShape
from llmc_runtime.server.tool_calls.parser_select import OutputFormats, select_formats
from llmc_runtime.server.tool_calls.registry import FORMATS, GROUP
from llmc_runtime.server.tool_calls.response_plan import answer, calls_of

from tests.runtime.followed import Followed
from tests.runtime.parrots import TOK
from tests.runtime.test_tools_grammars import allows
from tests.runtime.test_tools_text import check_pieces, parsed


class Arrow(JsonShape):
    """<calls>call NAME#INDEX => {...};</calls>, the whole declaration of a new format."""

    name = "arrow"
    markers = ("<calls>", "</calls>")
    between = None
    shown = ("<calls>", "=>")
    call = ("call ", Json.NAME, Optional(("#", Word.INDEX)), " => ", Json.ARGUMENTS, ";")
    end = "</calls>"


class Letters(MessageShape):
    """@startmodel@tosomeone|tool.NAME now@body{...}: another format of messages with headers."""

    name = "letters"
    markers = ("@start", "@to", "@body")
    start = ("@start", "model")
    channel = "@to"
    message = "@body"
    end = "@end"
    answer = "user"
    comment = "log"
    recipient = "|tool."
    call = ("someone", "|tool.", Json.NAME, " now")


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
]
KNOWN = {"f": {}, "g": {}}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOK, TOK.vocab_size, [TOK.eos_token_id or 0])
    yield made
    made.close()


def test_a_declared_format_is_read_however_the_text_is_cut() -> None:
    written = 'Well. <calls>call f#0 => {"n": 1};</calls>'
    assert parsed(Arrow, [written], KNOWN) == ("Well.", [("f", '{"n": 1}')])
    assert parsed(Arrow, ['<calls> call g  =>\n{"a": [2]} ;'], KNOWN) == ("", [("g", '{"a": [2]}')])
    assert parsed(Arrow, ["<calls>call f#x => {};"], KNOWN) == ("<calls>call f#x => {};", [])
    assert parsed(Arrow, ["So <calls>call f#0"], KNOWN, cut_off=True) == ("So ", [])
    both = '<calls>call f#0 => {"n": 1};call g#1 => {};</calls>'
    assert parsed(Arrow, [both], KNOWN) == parsed(Arrow, list(both), KNOWN) == ("", [("f", '{"n": 1}'), ("g", "{}")])
    assert parsed(Arrow, [both.replace("#1", "#x")], KNOWN) == ("call g#x => {};</calls>", [("f", '{"n": 1}')])
    draw = random.Random(7)
    parts = ("<calls>", "</calls>", "call ", "f", "#", "0", " => ", '{"n": 1}', ";", "{", "x", " " * 70, "\n", "<ca")
    for seed in range(300):
        at = draw.randrange(len(written))
        broken = written[:at] + draw.choice(parts) + written[at + draw.randrange(3) :]
        for text in (broken, "".join(draw.choices(parts, k=8))):
            check_pieces(Arrow, text, seed, KNOWN)


def test_the_grammar_of_a_declared_format_allows_what_is_declared(grammars: Grammars) -> None:
    tools = tools_of(TOOLS, "required", None)
    assert tools is not None
    text = answer([calls_of(tools, Arrow, OutputFormats(Arrow, None, (), TOK).marker)], "calls", None, "tools")
    for output, allowed in (
        ('<calls>call f#0 => {"n": 1};</calls>', True), ("<calls>call g#12 => {};</calls>", True),
        ('<calls>call f#0 => {"n": 1};call g#1 => {};</calls>', True),
        ('<calls>call f#0 => {"n": "x"};</calls>', False), ("<calls>call h#0 => {};</calls>", False),
        ("<calls>call g => {};</calls>", False), ("<calls>call g#0 => {};", False), ("No.", False),
    ):  # fmt: skip
        assert allows(Followed.of(grammars, text), output) == allowed, output


def test_a_declared_format_of_messages_is_read_and_enforced(grammars: Grammars) -> None:
    written = '@tolog@bodyWell.@end@startmodel@tosomeone|tool.f now@body{"n": 1}'
    assert parsed(Letters, [written], KNOWN) == parsed(Letters, list(written), KNOWN) == ("Well.", [("f", '{"n": 1}')])
    assert parsed(Letters, ["@tonow|tool.g someone@body{}"], KNOWN) == ("", [("g", "{}")])  # parts in another order
    unknown = "@tosomeone|tool.h now@body{}"
    assert parsed(Letters, [unknown], KNOWN) == (unknown, [])
    assert parsed(Letters, ["@touser@bodyHello"], KNOWN) == ("Hello", [])
    tools = tools_of(TOOLS, "required", None)
    assert tools is not None
    text = answer([calls_of(tools, Letters, OutputFormats(Letters, None, (), TOK).marker)], "calls", None, "tools")
    call = '@tosomeone|tool.f now@body{"n": 1}'
    for output, allowed in (
        (call, True), (f"@startmodel{call}", True), (call.replace(".f", ".g"), True),
        (call.replace("1", '"x"'), False), (call.replace(".f", ".h"), False), (call.replace(" now", ""), False),
        ("@touser@bodyHello", False),
    ):  # fmt: skip
        assert allows(Followed.of(grammars, text), output) == allowed, output


def test_a_package_brings_a_format_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "arrow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arrow\nVersion: 1.0\n")
    entries = f"[{GROUP}]\narrow = {__name__}:Arrow\nno-format = json:dumps\nlost = nowhere_to_be_seen:Arrow\n"
    (info / "entry_points.txt").write_text(entries)
    with pytest.raises(LlmcError, match="is not allowed"):
        select_formats(None, None, "arrow")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert select_formats(None, None, "arrow").calls is Arrow
    for name in ("no-format", "lost"):
        with pytest.raises(LlmcError, match=f"tool_call_parser = '{name}': .*(CallFormat|loaded)"):
            select_formats(None, None, name)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--tool-call-parser", choices=CALL_FORMATS)
    assert parser.parse_args(["--tool-call-parser", "arrow"]).tool_call_parser == "arrow"
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--tool-call-parser", "bow"])


def test_our_names_do_not_read_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(**_: str) -> None:
        raise AssertionError("the entry points were read")

    monkeypatch.setattr("importlib.metadata.entry_points", never)
    assert all(name in CALL_FORMATS and select_formats(None, None, name) for name in CALL_FORMATS)


@pytest.mark.parametrize("form", [form for form in FORMATS if issubclass(form, JsonShape)], ids=lambda form: form.name)
def test_a_long_text_of_marks_without_calls_is_content(form: type[JsonShape]) -> None:
    text = (form.markers[0] + json.dumps(" " * 60)) * 3000
    assert parsed(form, [text], KNOWN) == (text, [])
