"""Printer and parser of the text form: parse(show(m)) equals m. docs/ir.md describes the grammar."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dim import Dim
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.qformat import QFormat, parse_qformat
from llmc.ir.types import Type, parse_type, split_commas, unquoted


def show(m: Module) -> str:
    """Print a module. Names are made unique within a graph, and locations become trailing comments."""
    head = [f"sym {s} in [{lo}, {hi}]" for s, (lo, hi) in m.symbols.items()]
    head += [str(f) for f in m.formats.values()]
    return "\n".join(head + [show_graph(g) for g in m.graphs.values()]) + "\n"


def show_graph(g: Graph) -> str:
    """Print one graph."""
    names = _Names(g)
    ins = ",\n    ".join(f"{names[v]}: {'weight ' if v.weight else ''}{v.type}" for v in g.inputs)
    where = ", ".join(f"{s} in [{lo}, {hi}]" for s, (lo, hi) in g.ranges.items())
    lines = [f"graph @{g.name}({ins}){' where ' + where if where else ''} {{"]
    lines += [f"  {show_node(n, names)}" for n in g.nodes]
    return "\n".join([*lines, f"  return {', '.join(names[v] for v in g.outputs)}", "}"])


def show_node(n: Node, names: Any) -> str:
    """Print one node; `names` maps values to %names."""
    args = ", ".join(names[v] for v in n.operands)
    shown = {k: v for k, v in n.attrs.items() if v != n.op.attrs[k].default} | n.choice
    attrs = ", ".join(f"{k}={show_attr(v)}" for k, v in shown.items())
    results = ", ".join(names[r] for r in n.results)
    types = ", ".join(str(r.type) for r in n.results)
    loc = f"  // {n.loc}" if n.loc else ""
    return f"{results} = {n.op.name}({args}){' {' + attrs + '}' if attrs else ''} : {types}{loc}"


def show_attr(v: Any) -> str:
    """Print an attribute value in the form that `parse_attr` reads."""
    if isinstance(v, Dim):
        return str(v)
    if isinstance(v, tuple | list):
        return "[" + ", ".join(map(show_attr, v)) + "]"
    if isinstance(v, float) and not math.isfinite(v):
        return {math.inf: "inf", -math.inf: "-inf"}.get(v, "nan")
    return json.dumps(v)


class _Names:
    """Maps values to %names that are unique in the graph.

    Inputs keep their names. Other values with a name that is in use become name.2, name.3, ..; unnamed values are
    numbered from 0.
    """

    def __init__(self, g: Graph):
        self.names: dict[Value, str] = {}
        self.used: set[str] = set()
        self.last_number: dict[str, int] = {}  # name -> last number given to it; "" for unnamed values
        for v in [*g.inputs, *(r for n in g.nodes for r in n.results if r.name)]:
            self._add(v)

    def __getitem__(self, v: Value) -> str:
        if v not in self.names:
            self._add(v)
        return "%" + self.names[v]

    def _add(self, v: Value) -> None:
        """Choose the name of a value; repeated calls keep it."""
        if v in self.names:
            return
        name = v.name or self._numbered("")
        while name in self.used:
            name = self._numbered(v.name)
        self.names[v] = name
        self.used.add(name)

    def _numbered(self, name: str) -> str:
        """Return the next numbered form of a name, or the next number for an unnamed value."""
        first = 2 if name else 0
        number = self.last_number.get(name, first - 1) + 1
        self.last_number[name] = number
        return f"{name}.{number}" if name else str(number)


_HEAD = re.compile(r"graph @([\w.-]+)\(")
_NODE = re.compile(r"(?P<res>%[^=]*?)\s*=\s*(?P<op>\w+)\((?P<args>[^)]*)\)\s*")
_RANGE = re.compile(r"(\w+) in \[(\d+), (\d+)\]")
_SYM = re.compile(r"sym (\w+) in \[(\d+), (\d+)\]")
_FORM = "see docs/ir.md for the text form"


def parse(text: str, ops: Mapping[str, OpDef], source: str | Path = "") -> Module:
    """Parse a module, the inverse of `show`.

    Raises Diagnostic E401 with the problem, the line number and, if given, the name of the file that the text is from.
    """
    return _Reader(text, ops, f"{source}, line" if str(source) else "line").module()


def parse_file(path: str | Path, ops: Mapping[str, OpDef]) -> Module:
    """Parse the module in a file, or on standard input if `path` is "-"; raises Diagnostic E401, OSError."""
    return parse(read_ir(path), ops, "standard input" if path == "-" else path)


def read_ir(path: str | Path) -> str:
    """Return the text of a file, or of standard input if `path` is "-".

    Raises Diagnostic E401 if it is not UTF-8, OSError if it cannot be read.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        where = "standard input" if path == "-" else path
        raise Diagnostic("E401", f"{where} is not UTF-8 text: {e.reason} at byte {e.start}", _FORM) from None


class _Reader:
    """Line-based parser of modules. Node and graph syntax is described in docs/ir.md."""

    def __init__(self, text: str, ops: Mapping[str, OpDef], line: str):
        self.ops = ops
        self.line = line  # the words before a line number in errors
        lines = enumerate(map(str.strip, text.splitlines()), 1)
        self.lines = [(number, line) for number, line in lines if line and not line.startswith("//")]
        self.pos = 0
        self.m = Module()
        self.formats: dict[str, QFormat] = {}

    def fail(self, line: int, why: str, remedy: str = "") -> Diagnostic:
        return Diagnostic("E401", f"{self.line} {line}: {why}", remedy or _FORM)

    def module(self) -> Module:
        """Parse symbols, formats and graphs until the end of the text."""
        while self.pos < len(self.lines):
            number, line = self.lines[self.pos]
            if s := _SYM.fullmatch(line):
                self.m.symbols[s[1]] = int(s[2]), int(s[3])
                self.pos += 1
            elif line.startswith("format "):
                self.format(number, line)
            elif _HEAD.match(line):
                self.graph(number)
            else:
                raise self.fail(number, f"cannot read {line!r}")
        return self.m

    def format(self, number: int, line: str) -> None:
        try:
            f = parse_qformat(line)
        except (ValueError, KeyError) as e:
            raise self.fail(number, f"{e}") from None
        self.formats[f.name] = f
        self.pos += 1

    def ranges(self, number: int, text: str) -> dict[str, tuple[int, int]]:
        """Parse the ranges of a graph's where clause, such as R in [2, 16], T in [1, 9]."""
        out = {m[1]: (int(m[2]), int(m[3])) for m in _RANGE.finditer(text)}
        if _RANGE.sub("", text).strip(" ,\n"):
            raise self.fail(number, f"cannot read the ranges {text.strip()!r}", "graph @g(..) where R in [2, 16] {")
        return out

    def graph(self, number: int) -> None:
        """Parse a graph; its header may span several lines."""
        header = ""
        while not header.endswith("{"):
            if self.pos >= len(self.lines):
                raise self.fail(number, "the graph's header does not end with '{'")
            header += " " + self.lines[self.pos][1]
            self.pos += 1
        m = re.fullmatch(r"\s*graph @([\w.-]+)\((.*)\)\s*(?:where ([^(){}]*))?\{", header, re.S)
        if not m:
            raise self.fail(number, "not a graph header: graph @name(%input: type, ...) {")
        if m[1] in self.m.graphs:
            raise self.fail(number, f"duplicate graph @{m[1]}")
        g = Graph(m[1], ranges=self.ranges(number, m[3] or ""))
        env: dict[str, Value] = {}
        for part in split_commas(m[2]):
            self.input(number, g, env, part)
        self.body(g, env)
        self.m.graphs[g.name] = g

    def input(self, number: int, g: Graph, env: dict[str, Value], part: str) -> None:
        p = re.fullmatch(r"%([\w.-]+):\s*(weight\s+)?(.*)", part, re.S)
        if not p:
            raise self.fail(number, f"not an input: {part!r}")
        if p[1] in env:
            raise self.fail(number, f"duplicate input %{p[1]}")
        env[p[1]] = g.input(p[1], self.type(number, p[3]), bool(p[2]))

    def type(self, number: int, text: str) -> Type:
        try:
            return parse_type(text, self.formats)
        except ValueError as e:
            raise self.fail(number, str(e)) from None

    def body(self, g: Graph, env: dict[str, Value]) -> None:
        while self.pos < len(self.lines):
            number, line = self.lines[self.pos]
            self.pos += 1
            if line == "}":
                return
            if line.startswith("return"):
                g.outputs = [self.value(number, env, v) for v in split_commas(line[6:])]
            else:
                self.node(number, line, g, env)
        raise self.fail(self.lines[-1][0], f"@{g.name} is not closed with '}}'")

    def value(self, number: int, env: dict[str, Value], text: str) -> Value:
        name = text.removeprefix("%")
        if name not in env:
            raise self.fail(number, f"%{name} is not defined before its use")
        return env[name]

    def node(self, number: int, line: str, g: Graph, env: dict[str, Value]) -> None:
        """Parse a node, infer its result types, and compare them with the printed ones."""
        line, _, loc = line.partition("  // ")
        p = _NODE.match(line)
        if not p:
            raise self.fail(number, f"cannot read {line!r}")
        if p["op"] not in self.ops:
            raise self.fail(number, f"unknown op {p['op']!r}", "`llmc ops` lists the op set")
        op = self.ops[p["op"]]
        attrs_text, types_text = _split_attrs(line[p.end() :])
        if attrs_text is None or types_text is None:
            raise self.fail(number, f"cannot read {line!r}: expected {{attributes}} : types")
        attrs = dict(self.attr(number, a) for a in split_commas(attrs_text))
        choice = _take_choice(op, attrs)
        operands = [self.value(number, env, a) for a in split_commas(p["args"])]
        names = [r.strip().removeprefix("%") for r in p["res"].split(",")]
        try:
            node = g.add(op, operands, attrs, loc=loc.strip(), names=["" if n.isdigit() else n for n in names])
        except TypeError as e:
            raise self.fail(number, f"@{g.name}: {e}") from None
        node.choice = choice
        self.check_results(number, g, node, names, types_text)
        env |= dict(zip(names, node.results, strict=True))

    def check_results(self, number: int, g: Graph, node: Node, names: list[str], types: str) -> None:
        printed = [self.type(number, t) for t in split_commas(types)]
        inferred = [r.type for r in node.results]
        if printed != inferred:
            rule = ", ".join(map(str, inferred))
            raise self.fail(number, f"@{g.name}: {node.op.name}: the type rule gives {rule}, the text declares {types}")
        if len(names) != len(inferred):
            raise self.fail(
                number, f"@{g.name}: {node.op.name} has {len(inferred)} results, the text names {len(names)}"
            )

    def attr(self, number: int, text: str) -> tuple[str, Any]:
        key, eq, value = text.partition("=")
        try:
            if not eq or not key.strip().isidentifier():
                raise ValueError(f"not an attribute: {text!r}")
            return key.strip(), parse_attr(value.strip())
        except ValueError as e:
            raise self.fail(number, str(e)) from None


def parse_attr(text: str) -> Any:
    """Parse a JSON scalar, a list, inf, nan, or a size such as 2*T+1; raises ValueError."""
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"not a list: {text!r}")
        return tuple(parse_attr(t) for t in split_commas(text[1:-1]))
    if text in ("inf", "-inf", "nan"):
        return float(text)
    try:
        return json.loads(text)
    except ValueError:
        return Dim.of(text)


def _split_attrs(text: str) -> tuple[str | None, str | None]:
    """Split '{a=1} : types' into ('a=1', 'types'), ignoring braces in string literals."""
    text = text.strip()
    if not text.startswith("{"):
        return ("", text[1:].strip()) if text.startswith(":") else (None, None)
    depth = 0
    for i, c in unquoted(text):
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
        if depth == 0:
            rest = text[i + 1 :].strip()
            return (text[1:i], rest[1:].strip()) if rest.startswith(":") else (None, None)
    return None, None


def _take_choice(op: OpDef, attrs: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the attributes that belong to the kernel choice.

    If a kernel is named, these are all attributes that the op does not declare. Otherwise none are taken, and
    `Graph.add` rejects the undeclared ones.
    """
    if "kernel" not in attrs or "kernel" in op.attrs:
        return {}
    return {k: attrs.pop(k) for k in list(attrs) if k not in op.attrs}
