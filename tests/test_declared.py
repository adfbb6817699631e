"""Contracts that are declared once: one more line of a declaration appears everywhere; docs/ has the declarations.

`python tests/test_declared.py` writes the tables in docs/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_names
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.row_abi import WIDTH
from llmc_runtime.ignored_options import IGNORED, REFUSED
from llmc_runtime.option_type import Option, options_of
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS, columns
from llmc_runtime.sched.sampling_params import PARAMETERS
from llmc_runtime.server.server_options import serve_options

from llmc.codegen.backends.cpp.cpp_kernel import inline_headers
from llmc.codegen.backends.triton.template import load as load_template

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime" / "llmc_runtime"
MARKS = "<!-- written by tests/test_declared.py: {} -->", "<!-- end of {} -->"


def shown(value: Any) -> str:
    """A default as the docs have it."""
    if value is None or value in ((), [], ""):
        return "none"
    return json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parameters() -> Iterator[str]:
    """The table of sampling parameters."""
    from llmc_runtime.server.requests.request_fields import ChatRequest

    yield "| field | values | default | what it does | also as |"
    yield "|---|---|---|---|---|"
    for one in PARAMETERS.values():
        unit = f" ({one.values.unit})" if one.values.unit else ""
        also = ["request field"] * (one.name in ChatRequest.__struct_fields__) + [f"`{flag}`" for flag in one.flags]
        cells = one.values.allowed + unit, shown(one.default), one.text, ", ".join(also)
        yield f"| `{one.name}` | {' | '.join(cells)} |"


def flags_of(one: Option, *commands: str, argument: str = "") -> str:
    """The flags of these commands, as the docs have them."""
    found = (*one.spellings, *one.negations) if set(commands) & set(one.commands) else ()
    return ", ".join(f"`{flag}{argument}`" for flag in found)


def described(name: str, default: Any, text: str) -> str:
    """An option as an item of a list. A default that the text does not have follows it."""
    value = f"{default >> 20}M" if isinstance(default, int) and default >= 1 << 20 else shown(default)
    if value not in ("none", "false") and not re.search(rf"\((default: )?{re.escape(value)}[:;)]|default", text):
        text += f". Default: `{value}`"
    item = f"- {name}: {text}"
    return textwrap.fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def engine_options() -> Iterator[str]:
    """The list of the engine's options, and of AsyncLLM's own."""
    for one in options_of(EngineArgs).values():
        run, serve = flags_of(one, "run", "compile"), flags_of(one, "serve")
        flags = run if run == serve else f"only `llmc-serve`: {serve}" if serve else f"not `llmc-serve`: {run}"
        yield described(f"`{one.name}`" + (f" ({flags})" if flags else ""), one.default, one.text)


def server_options() -> Iterator[str]:
    """The list of llmc-serve's own options."""
    engine = options_of(EngineOptions).values()
    for one in serve_options().values():
        if one in engine or not one.file:
            continue
        choices = f". Values: {', '.join(f'`{choice}`' for choice in one.choices)}" if one.choices else ""
        argument = f" {one.metavar.replace('|', ' or ')}" if one.metavar and not one.choices else ""
        yield described(flags_of(one, "serve", argument=argument), one.unset, one.text + choices)


def vllm_flags() -> Iterator[str]:
    """The flags of vLLM that are ignored or rejected."""
    yield "| flag | here |"
    yield "|---|---|"
    for row in (*IGNORED, *REFUSED):
        flags = ", ".join(f"`{flag}`" for flag in row.flags)
        if row.harmless is None:
            what = "ignored"
        else:
            allowed = [f"`{value}`" if value else "an empty text" for value in row.harmless]
            what = "rejected" + (f", except {', '.join(allowed[:5])}" if allowed else "")
            what += f", ..., {allowed[-1]}" if len(allowed) > 5 else ""
        yield f"| {flags} | {what}: {row.reason} |"


TABLES = {
    ("running.md", "sampling parameters"): parameters,
    ("running.md", "engine options"): engine_options,
    ("serving.md", "server options"): server_options,
    ("vllm.md", "vLLM's flags"): vllm_flags,
    ("vllm.md", "vLLM's Python API"): vllm_names.python_api,
    ("vllm.md", "vLLM's endpoints"): vllm_names.endpoints,
    ("vllm.md", "vLLM's metrics"): vllm_names.metrics,
}


def split(page: str, name: str) -> tuple[str, str, str]:
    """Return the page before a table, the table with its marks, and the page after it."""
    begin, end = (mark.format(name) for mark in MARKS)
    assert page.count(begin) == page.count(end) == 1, name
    before, _, rest = page.partition(begin)
    table, _, after = rest.partition(end)
    return before, begin + table + end, after


def written(name: str, lines: Iterator[str]) -> str:
    """A table with its marks."""
    begin, end = (mark.format(name) for mark in MARKS)
    return "\n".join([begin, "", *lines, "", end])


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_the_docs_have_what_is_declared(page: str, name: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert split(text, name)[1] == written(name, TABLES[page, name]()), "run: python tests/test_declared.py"


def test_kernels_take_the_columns_of_the_row_from_its_declaration() -> None:
    assert set(FLOAT_COLUMNS) <= PARAMETERS.keys() and max(len(FLOAT_COLUMNS), len(INT_COLUMNS)) <= WIDTH
    modules = load_template("row_params"), load_template("sampling_rules")
    texts = "".join(d.text + "\n" for module in modules for d in module.definitions.values())
    found = {name: int(value) for name, value in re.findall(r"^(\w+) = tl\.constexpr\((\d+)\)", texts, re.M)}
    expected = {name.upper(): i for names in (FLOAT_COLUMNS, INT_COLUMNS) for i, name in enumerate(names)}
    assert found == {"PARAMS": WIDTH, **expected}, "a column has no constant in row_params.py or sampling_rules.py"
    text = inline_headers('#include "llmc_sample.h"\n')
    for names in (FLOAT_COLUMNS, INT_COLUMNS):
        assert f"enum {{ {', '.join(names).upper()} }};" in text


@pytest.mark.parametrize("numbers", [{"a": 1}, {"a": 0, "b": 0}, {"a": 0, "b": 2}, {str(i): i for i in range(9)}])
def test_columns_have_numbers_without_gaps(numbers: dict[str, int]) -> None:
    assert columns({"b": 1, "a": 0}) == ("a", "b")
    with pytest.raises(ValueError, match="expected each number from 0 once, all below 8"):
        columns(numbers)


def changed(folder: Path, edits: dict[str, list[tuple[str, str]]]) -> Path:
    """Copy the packages to `folder`, replace texts of some files, and return `folder`.

    `edits` maps files, relative to `folder`, to pairs of a text that occurs in the file and its replacement.
    """
    for package in {name.partition("/")[0] for name in edits}:
        source = RUNTIME if package == RUNTIME.name else ROOT / package
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, texts in edits.items():
        content = (folder / name).read_text(encoding="utf-8")
        for old, new in texts:
            assert old in content, (name, old)
            content = content.replace(old, new)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def before(text: str, added: str) -> tuple[str, str]:
    """The edit that puts `added` in front of `text`."""
    return text, added + text


def answers(folder: Path, program: str, *arguments: str) -> Any:
    """Return the parsed JSON output of a program that can import the packages in `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, RUNTIME.parent, ROOT / "tests"))),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


NEW_PARAMETER = """    top_a: float = parameter(
        0.0, numbers(0, 1), "a new one", flag=True, model_default="sampling", float_column=6
    )
"""
PARAMETER_PROGRAM = """
import json, sys
from llmc_runtime.cli import _changed, parser
from llmc_runtime.engine.messages import params_message, params_of
from llmc_runtime.defaults import default_params
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request_init import init_request
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams
from llmc_runtime.sched.request import Request
from llmc_runtime.server.requests.request_fields import CompletionRequest
from llmc_runtime.server.openapi import description
from llmc_runtime.server.requests.parse import parse
from llmc_runtime.server.requests.sampling_fields import of_completion
from tests.test_declared import parameters
class Model:
    generation, vocab_size = {"do_sample": True, "top_a": 0.5}, 9
    def get_default_sampling_params(self, *, max_tokens=16):
        return default_params(self.generation, max_tokens=max_tokens)
def refusal(make):
    try:
        return str(make())
    except LlmcError as e:
        return e.cause
def completion(body):
    return of_completion(parse(body, CompletionRequest, lambda n: None), Model()).top_a
request = Request("0", [1], SamplingParams(top_a=0.25))
init_request(request, SchedulerConfig(9, 4, 32, 1, 9, 9), 0)
schemas = description()["components"]["schemas"]
print(json.dumps({
    "refused": refusal(lambda: SamplingParams(top_a=2)),
    "described": [schemas[kind]["properties"]["top_a"] for kind in ("CompletionRequest", "ChatRequest")],
    "request": completion(b'{"prompt": "x", "max_tokens": 2, "top_a": 0.125}'),
    "model": completion(b'{"prompt": "x", "max_tokens": 2}'),
    "flag": _changed(parser("llmc-run", False).parse_args(["m", "--top-a", "0.75"])),
    "message": params_message(SamplingParams(top_a=0.25)), "back": params_of({"top_a": 0.25}).top_a,
    "row": request.row_params.floats(), "docs": [row for row in parameters() if "top_a" in row],
}))
"""


def test_a_new_sampling_parameter_is_one_declaration(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    edits = {
        "llmc_runtime/sched/sampling_params.py": [before("    repetition_penalty: float", NEW_PARAMETER)],
    }
    found = answers(changed(tmp_path, edits), PARAMETER_PROGRAM)
    field = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}], "default": None}
    assert found == {
        "refused": "top_a = 2 is not allowed",
        "described": [{**field, "description": "a new one"}] * 2,
        "request": 0.125, "model": 0.5, "flag": {"top_a": 0.75}, "message": {"top_a": 0.25}, "back": 0.25,
        "row": [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.25, 0.0],
        "docs": ["| `top_a` | a number from 0 to 1 | 0 | a new one | request field, `--top-a` |"],
    }  # fmt: skip


NEW_ENGINE_OPTION = (
    '    most_cats: int | None = option(None, "a new one", commands=("serve", "run"), read=positive, metavar="N",'
    ' check=_integer("E201", 1, 99), engine=True)\n'
)
NEW_SERVER_OPTION = '    greeting: str = serve_option("server", "hello", "another one", choices=("hello", "bye"))\n'
OPTION_PROGRAM = """
import json
from pathlib import Path
from llmc_runtime import LLM, AsyncLLM, LlmcError
from llmc_runtime.cli import parser
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.server.server_options import serve_parser
from llmc_runtime.server.config import options_of, read
from llmc.completion import script
from tests.test_declared import engine_options, server_options
def refusal(make):
    try:
        return str(make())
    except LlmcError as e:
        return e.cause
def served(*words):
    options = options_of(read(["m", *words]).args, {}, None)
    return [options.engine["most_cats"], options.greeting]
Path("serve.yaml").write_text("most-cats: 7\\ngreeting: bye\\n")
completion = script("bash", {"llmc-serve": serve_parser()})
message = EngineOptions("m", most_cats=3).message()
print(json.dumps({
    "refused": [refusal(lambda: LLM("nowhere", most_cats=0)), refusal(lambda: AsyncLLM("m", most_cats=0))],
    "keyword": AsyncLLM("m", most_cats=3).args.most_cats,
    "flags": served("--most-cats", "5", "--greeting", "bye"), "default": served(),
    "file": served("--config", "serve.yaml"),
    "run": parser("llmc-run", False).parse_args(["m", "--most-cats", "2"]).most_cats,
    "printed": [name in read(["m"]).describe(False) for name in ("most-cats", "greeting")],
    "message": message, "back": EngineOptions.of_message("m", message).most_cats,
    "completed": [word in completion for word in ("--most-cats", "--greeting", "hello bye")],
    "docs": [row for row in (*engine_options(), *server_options()) if "most_cats" in row or "greeting" in row],
}))
"""


def test_a_new_option_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    edits = {
        "llmc_runtime/engine_options.py": [before("    prepare: bool", NEW_ENGINE_OPTION)],
        "llmc_runtime/server/server_options.py": [before("    chat_template: str | None", NEW_SERVER_OPTION)],
    }
    found = answers(changed(tmp_path, edits), OPTION_PROGRAM)
    assert found == {
        "refused": ["most_cats = 0 is not allowed"] * 2, "keyword": 3, "flags": [5, "bye"],
        "default": [None, "hello"], "file": [7, "bye"], "run": 2, "printed": [True] * 2, "message": {"most_cats": 3},
        "back": 3, "completed": [True] * 3,
        "docs": [
            "- `most_cats` (`--most-cats`): a new one",
            "- `--greeting`: another one. Values: `hello`, `bye`. Default: `hello`",
        ],
    }  # fmt: skip


NEW_FORMATS = """class Arrow(JsonShape):
    name = "arrow"
    aliases = ("dart",)
    markers = ("<calls>", "</calls>")
    between = None
    shown = ("<calls>", "=>")
    call = ("call ", Json.NAME, " => ", Json.ARGUMENTS, ";")
    end = "</calls>"


class Angles(XmlShape):
    name = "angles"
    markers = ("<do>", "</do>")
    call = (Xml.NAME, LINE, Xml.FIELDS, "</do>")
    field = ("<set ", Xml.KEY, ">", Xml.VALUE, "</set>")


class Slashes(PythonShape):
    name = "slashes"
    markers = ("<py>", "</py>")
    marks_enforced = True


"""
FORMAT_PROGRAM = """
import json
from llmc_runtime.server.server_options import serve_parser
from llmc_runtime.server.tool_calls.call_format import CallPiece
from llmc_runtime.server.tool_calls.definitions import tools_of
from llmc_runtime.server.tool_calls.response_plan import calls_of
from llmc_runtime.server.tool_calls.parser_select import select_formats
from llmc_runtime.server.tool_calls.registry import FORMATS
from llmc.completion import script
def read(name, text):
    reader = select_formats(None, None, name).calls({"f": {}})
    pieces = reader.push(text) + reader.finish()
    return [[piece.name, piece.arguments] if isinstance(piece, CallPiece) else piece for piece in pieces]
tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}
grammars = {form.name: calls_of(tools_of([tool], "required", None), form, json.dumps) for form in FORMATS}
words = script("bash", {"llmc-serve": serve_parser()})
print(json.dumps({
    "flag": serve_parser().parse_args(["m", "--tool-call-parser", "dart"]).tool_call_parser,
    "help": " ".join(serve_parser().format_help().split()).count("arrow"),
    "completed": [name in words for name in ("arrow", "dart", "angles", "slashes")],
    "template": [form.name for form in FORMATS if form.fits("tools: <calls>call NAME => ARGUMENTS;</calls>")],
    "arrow": read("dart", '<calls>call f => {"n": 1};</calls>'),
    "angles": read("angles", "<do>f<set n>1</set></do>"), "slashes": read("slashes", "<py>[f(n=None)]</py>"),
    "grammars": ["call " in grammars["arrow"], "</do>" in grammars["angles"], "<py>" in grammars["slashes"]],
}))
"""


def test_a_new_call_format_is_one_class_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    edits = {
        "llmc_runtime/server/tool_calls/registry.py": [
            before("# Of those that fit", NEW_FORMATS), before("Granite20b, Phi4Mini,", "Arrow, Angles, Slashes, ")
        ]
    }  # fmt: skip
    found = answers(changed(tmp_path, edits), FORMAT_PROGRAM)
    assert found == {
        "flag": "dart", "help": 2, "completed": [True] * 4, "template": ["arrow"],
        "arrow": [["f", ""], [None, '{"n": 1}']],
        "angles": [["f", ""], [None, '{"n": '], [None, "1"], [None, "}"]],
        "slashes": [["f", ""], [None, '{"n": '], [None, "null"], [None, "}"]],
        "grammars": [True] * 3,
    }  # fmt: skip


if __name__ == "__main__":
    for (page, name), lines in TABLES.items():
        path = ROOT / "docs" / page
        head, _, after = split(path.read_text(encoding="utf-8"), name)
        path.write_text(head + written(name, lines()) + after, encoding="utf-8")
