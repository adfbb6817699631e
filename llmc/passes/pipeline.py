"""Parser and runner of pipelines, which are written as text:

    canonicalize, fuse-norm, page-attention{rows=8, page=16} | select, pack
    serve, after fuse-norm: my-fuse, before select: other{depth=2}, without fuse-rope

`|` separates passes as `,` does; by convention it separates target-independent passes from the others. The name of a
pipeline stands for its passes.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc_runtime.format.nearest import did_you_mean

from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Module
from llmc.ir.types import split_commas
from llmc.ir.verify import verify
from llmc.passes.base import Ctx, Pass

_ITEM = re.compile(r"(?:(after|before)\s+([\w-]+)\s*:\s*)?([\w-]+)\s*(?:\{(.*)\})?", re.S)
_WITHOUT = re.compile(r"without\s+([\w-]+)")
_OPTION = re.compile(r"\s*([\w-]+)\s*=\s*(\"[^\"]*\"|\[[^\]]*\]|[^,\s\"]+)\s*(?:,|$)")


def parse_pipeline(
    text: str, passes: Mapping[str, type[Pass]], pipelines: Mapping[str, str] | None = None
) -> list[Pass]:
    """Parse a pipeline into passes; raises Diagnostic E420 (unknown name) or E421 (bad syntax or option)."""
    named = pipelines or {}
    out: list[Pass] = []
    for item in split_commas(text, ",|\n"):
        if m := _WITHOUT.fullmatch(item):
            del out[_position(out, m[1], item)]
            continue
        m = _ITEM.fullmatch(item)
        if not m:
            raise Diagnostic("E421", f"{item!r} is not a pass", "write: name, or name{option=value, ...}")
        where, anchor, name, options = m.groups()
        if name in named and options is None:
            new = parse_pipeline(named[name], passes, {k: v for k, v in named.items() if k != name})
        else:
            new = [make(name, _options(options or "", item), passes)]
        at = len(out)
        if where is not None:
            at = _position(out, anchor, item)
        if where == "after":
            at += 1
        out[at:at] = new
    return out


def make(name: str, options: Mapping[str, Any], passes: Mapping[str, type[Pass]]) -> Pass:
    """Create a pass with options, whose names may contain dashes; raises Diagnostic E420 or E421."""
    if name not in passes:
        hint = did_you_mean(name, passes, f"known passes: {', '.join(sorted(passes))}")
        raise Diagnostic("E420", f"there is no pass {name!r}", hint)
    kind = passes[name]
    types = {f.name: f for f in dataclasses.fields(kind)}
    values = {k.replace("-", "_"): v for k, v in options.items()}
    for key, value in values.items():
        if key not in types:
            remedy = f"use one of its options: {', '.join(types)}" if types else "leave it out: the pass has no options"
            raise Diagnostic("E421", f"pass {name} has no option {key!r}", remedy)
        default = getattr(kind, key, None)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
        elif default is not None and type(value) is not type(default):
            expected = type(default).__name__
            cause = f"pass {name}: {key}={value!r} is not of type {expected}"
            raise Diagnostic("E421", cause, f"write a value such as the default, {default!r}")
    return kind(**values)


def require(passes: Sequence[Pass], name: str, option: str, place: str = "") -> None:
    """Raise Diagnostic E421 if the pass that an option of the compiler needs is missing; `place`: where to add it."""
    if not any(p.name == name for p in passes):
        cause = f"{option} needs the pass {name}, which the pipeline lacks"
        raise Diagnostic("E421", cause, f"add it to --pipeline{place}")


def override(passes: Sequence[Pass], name: str, **options: Any) -> list[Pass]:
    """Return the passes with some options of the pass `name` replaced."""
    return [dataclasses.replace(p, **options) if p.name == name else p for p in passes]


def spell_pass(p: Pass) -> str:
    """Return the text that `parse_pipeline` parses to this pass."""
    options = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    options = {k: v for k, v in options.items() if v != getattr(type(p), k, None)}
    if not options:
        return p.name
    return f"{p.name}{{{', '.join(f'{k}={_spell(v)}' for k, v in options.items())}}}"


Observer = Callable[[int, Pass, int, float, Module], None]


def run_pipeline(m: Module, passes: Sequence[Pass], ctx: Ctx, observe: Observer | None = None) -> int:
    """Run passes in order and verify the module after each; return the total number of changes.

    `observe(index, pass, changes, seconds, module)` is called after each pass. Errors of the verifier name the pass.
    """
    total = 0
    for i, p in enumerate(passes):
        start = time.perf_counter()
        changes = _run(p, m, ctx)
        seconds = time.perf_counter() - start
        try:
            verify(m)
        except Diagnostic as e:
            raise Diagnostic(e.code, f"after {p.name}: {e.cause}", e.remedy or "this is a bug in the pass") from e
        total += changes
        if observe:
            observe(i, p, changes, seconds, m)
    return total


def _run(p: Pass, m: Module, ctx: Ctx) -> int:
    """Run one pass; errors in the code of an extension name the pass."""
    try:
        with extension_code(f"pass {p.name!r}", type(p)):
            changes = p.run(m, ctx)
            if not isinstance(changes, int):
                raise TypeError(f"run returned {changes!r}, not the number of changes")
            return changes
    except Diagnostic as e:
        if e.code != "E427" or e.cause.startswith("pass "):
            raise
        raise Diagnostic(e.code, f"pass {p.name!r}: {e.cause}", e.remedy) from e


def _position(out: Sequence[Pass], name: str, item: str) -> int:
    at = [i for i, p in enumerate(out) if p.name == name]
    if not at:
        names = ", ".join(p.name for p in out) or "nothing"
        raise Diagnostic("E420", f"{item!r}: the pipeline so far has no {name!r}", f"use one of its passes: {names}")
    return at[-1] if item.startswith("after") else at[0]


def _options(text: str, item: str) -> dict[str, Any]:
    """Parse the options of a pass, "name=value, ...". Raises Diagnostic E421."""
    out: dict[str, Any] = {}
    pos = 0
    while pos < len(text.rstrip()):
        m = _OPTION.match(text, pos)
        if not m:
            raise Diagnostic("E421", f"{item!r}: cannot read the option at {text[pos:]!r}", "write: name=value, ...")
        out[m[1]] = _value(m[2])
        pos = m.end()
    return out


def _value(text: str) -> Any:
    """Parse an option's value: a string, a list, a boolean or a number; other text stays text."""
    if text.startswith('"'):
        return text[1:-1]
    if text.startswith("["):
        return tuple(_value(t.strip()) for t in text[1:-1].split(",") if t.strip())
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_spell, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
