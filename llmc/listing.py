"""`llmc ops` and `llmc passes`: tables of ops, passes and pipelines, generated from their declarations."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from typing import IO, Any

from llmc_runtime.format.nearest import did_you_mean

from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.opdef import REQUIRED, OpDef
from llmc.ir.text import show_attr


def describe_op(op: OpDef) -> dict[str, Any]:
    """Return an op's declaration as plain data."""
    attrs = {
        k: {
            "type": getattr(a.type, "__name__", str(a.type)) if isinstance(a.type, type) else "list",
            "default": None if a.default is REQUIRED else show_attr(a.default),
            "required": a.default is REQUIRED,
        }
        for k, a in op.attrs.items()
    }
    return {
        "name": op.name,
        "signature": op.signature,
        "attributes": attrs,
        "flops": op.flops,
        "bytes": op.bytes or "operands and results once",
        "writes": list(op.writes),
        "commutes": op.commutes,
        "oracle": op.oracle,
        "doc": op.doc,
    }


def main_ops(args: argparse.Namespace, out: IO[str]) -> int:
    """Run `llmc ops`: print the named ops in full, or all ops one per line; raises Diagnostic E424."""
    ops, names = load().opset(), args.names
    for name in names:
        if name not in ops:
            raise Diagnostic("E424", f"there is no op {name!r}", did_you_mean(name, ops, "`llmc ops` lists all"))
    data = [describe_op(ops[n]) for n in (names or ops)]
    if args.json:
        print(json.dumps(data, indent=2), file=out)
    elif names:
        print("\n\n".join(_full(d) for d in data), file=out)
    else:
        width = max(len(d["name"]) for d in data)
        for d in data:
            print(f"{d['name']:{width}}  {d['doc'].splitlines()[0]}", file=out)
    return 0


def _full(d: dict[str, Any]) -> str:
    lines = [d["name"], f"  {d['signature']}", *(f"  {line}" for line in d["doc"].splitlines())]
    for k, a in d["attributes"].items():
        lines.append(f"  {k}: {a['type']}" + (" (required)" if a["required"] else f" = {a['default']}"))
    lines.append(f"  flops {d['flops']}; bytes {d['bytes']}")
    lines += [f"  writes {', '.join(d['writes'])}"] if d["writes"] else []
    lines += [f"  tested against {d['oracle']}"] if d["oracle"] else []
    return "\n".join(lines)


def describe_passes() -> dict[str, Any]:
    """Return the passes with their options, the named pipelines, and each target's "serve" pipeline as plain data."""
    registry = load()
    passes = []
    for name in registry.passes:
        kind = registry.passes[name]
        options = {f.name.replace("_", "-"): getattr(kind, f.name, None) for f in dataclasses.fields(kind)}
        passes.append({"name": name, "doc": inspect.getdoc(kind) or "", "options": options})
    serve = {name: make().pipeline for name, make in registry.targets.items()}
    return {"passes": passes, "pipelines": dict(registry.pipelines.items()), "serve": serve}


def main_passes(args: argparse.Namespace, out: IO[str]) -> int:
    """Run `llmc passes`: print the named passes in full, or all passes one per line and the pipelines.

    Raises Diagnostic E420 for an unknown pass.
    """
    data = describe_passes()
    passes = {p["name"]: p for p in data["passes"]}
    for name in args.names:
        if name not in passes:
            remedy = did_you_mean(name, passes, "`llmc passes` lists all")
            raise Diagnostic("E420", f"there is no pass {name!r}", remedy)
    named = [passes[name] for name in args.names]
    if args.json:
        print(json.dumps({"passes": named} if named else data, indent=2), file=out)
    elif named:
        print("\n\n".join(_full_pass(p) for p in named), file=out)
    else:
        _print_passes(data, out)
    return 0


def _full_pass(p: dict[str, Any]) -> str:
    """Return a pass's docstring, and its options with their defaults."""
    lines = [p["name"], *(f"  {line}".rstrip() for line in p["doc"].splitlines())]
    return "\n".join([*lines, *(f"  option {name} = {default}" for name, default in p["options"].items())])


def _print_passes(data: dict[str, Any], out: IO[str]) -> None:
    width = max(len(p["name"]) for p in data["passes"])
    for p in data["passes"]:
        options = ", ".join(f"{name}={default}" for name, default in p["options"].items())
        summary = next(iter(p["doc"].splitlines()), "")
        print(f"{p['name']:{width}}  {summary}" + (f"  {{{options}}}" if options else ""), file=out)
    for name, text in data["pipelines"].items():
        if name != "serve":
            print(f"\npipeline {name}:\n  {text}", file=out)
    for text in dict.fromkeys(data["serve"].values()):
        targets = ", ".join(t for t, pipeline in data["serve"].items() if pipeline == text)
        print(f"\npipeline serve of {targets}:\n  {text}", file=out)
