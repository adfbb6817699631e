"""`llmc diff`: compares two artifacts or two stages of the IR, as data and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import CANARY
from llmc_runtime.format.size_text import size_text

from llmc.artifact.cost_report import memory
from llmc.ir.text import read_ir
from llmc.report.formatting import us_text
from llmc.report.graph_diff import compare_graphs
from llmc.report.ir_lines import Stage, stage
from llmc.report.launch_costs import step_sizes
from llmc.report.open_artifact import Opened, open_artifact
from llmc.report.weights_diff import compare_weights

Rows = list[dict[str, Any]]


def diff(a: str, b: str) -> dict[str, Any]:
    """Compare two artifacts, or two stages (`ARTIFACT:STAGE` or an .llir file).

    The result's "same" is true if there is no difference. Artifacts give "about", "memory" and "time" ({"what", "a",
    "b"}), "kernels" ({"entry", "a", "b"}: keys that exist on one side only), "weights", and, for their last stages,
    "graphs" and "choices" (see `compare_graphs`). Stages give only "about", "graphs" and "choices". Raises LlmcError
    E101 to E108, and E129 if the two cannot be compared.
    """
    left, right = _open(a), _open(b)
    if isinstance(left, Opened) and isinstance(right, Opened):
        compared = _artifacts(left, right)
    elif isinstance(left, Opened) or isinstance(right, Opened):
        text, artifact = (b, a) if isinstance(left, Opened) else (a, b)
        cause = f"{artifact} is an artifact, {text} is a stage"
        raise LlmcError("E129", cause, f"compare two stages, for example {artifact}:memory")
    else:
        compared = {"about": _rows(left.head, right.head), **compare_graphs(left.graphs, right.graphs)}
    return {"a": a, "b": b, "same": not any(compared.values()), **compared}


def _open(name: str) -> Opened | Stage:
    """Open an artifact, a stage of one (ARTIFACT:STAGE), or an .llir file."""
    path = Path(name)
    if path.suffix == ".llir":
        return stage(read_ir(path), name)
    if path.is_dir() or ":" not in name:
        return open_artifact(path)
    folder, _, stage_name = name.rpartition(":")
    opened = open_artifact(Path(folder))
    stages = opened.stages
    numbered = {file.removeprefix("ir/").removesuffix(".llir"): file for file in stages.values()}
    file = stages.get(stage_name) or numbered.get(stage_name)
    if file is None:
        remedy = f"use one of its stages: {', '.join(stages)}" if stages else "compile the model again"
        raise LlmcError("E129", f"{folder} has no stage {stage_name!r}", remedy)
    return stage(opened.text(file), f"{folder}/{file}")


def _artifacts(a: Opened, b: Opened) -> dict[str, Any]:
    last = [stage(x.text(f), f).graphs for x in (a, b) for f in list(x.stages.values())[-1:]]
    compared = compare_graphs(*last) if len(last) == 2 else {"graphs": [], "choices": []}
    return {
        "about": _rows(_about(a), _about(b)),
        **compared,
        "kernels": _kernels(a, b),
        "memory": _rows(_memory(a), _memory(b)),
        "time": _rows(_time(a), _time(b)),
        "weights": compare_weights(a, b),
    }


def _about(artifact: Opened) -> dict[str, Any]:
    """Return the facts about an artifact that are compared, by name; hashes by their first 16 digits."""
    m = artifact.manifest
    compiled = artifact.reports.get("compile", {})

    def named(prefix: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{prefix}{name}": fact for name, fact in facts.items()}

    tokenizer = {name: entry.sha256[:16] for name, entry in m.files.items() if name.startswith("tokenizer/")}
    return {
        **named("source.", {name: fact for name, fact in vars(m.source).items() if name != "files"}),
        **named("source file ", {name: digest[:16] for name, digest in m.source.files.items()}),
        "target": m.target.name,
        "arch": m.target.arch,
        "features": " ".join(m.target.features),
        **vars(m.limits),
        "page_size": m.kv.page_size,
        "vocab_size": m.vocab_size,
        "eos_token_ids": list(m.eos_token_ids),
        **named("generation ", m.generation),
        **named("option ", compiled.get("options", {})),
        **named("version of ", compiled.get("versions", {})),
        "weights": m.weights.mode,
        "seed": m.weights.seed,
        "compiler": m.compiler,
        **named("file ", tokenizer),
        "canary": m.files[CANARY].sha256[:16] if CANARY in m.files else None,
    }


def _memory(a: Opened) -> dict[str, int]:
    plan = memory(a.programs, a.manifest.states, sum(w.bytes for w in a.manifest.weights.of_rank(0)))
    arenas = {f"arena of {n}": v for n, v in plan["arena_bytes"].items()}
    states = {f"state {n}": v for n, v in plan["state_bytes"].items()}
    return {"weights": plan["weights_bytes"], "KV page": plan["kv_bytes_per_page"], **states, **arenas}


def _time(a: Opened) -> dict[str, float]:
    predicted = a.predictions().get("programs", {})
    return {f"{n} ({step_sizes(p['sizes'])})": p["us"] for n, p in predicted.items()}


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> Rows:
    names = dict.fromkeys(chain(a, b))
    return [{"what": n, "a": a.get(n), "b": b.get(n)} for n in names if a.get(n) != b.get(n)]


def _kernels(a: Opened, b: Opened) -> Rows:
    """Return the kernels that only one side has, by entry; a kernel's key is a hash of its text and compiler."""
    entries_a, entries_b = ({k.hash: k.entry for k in x.manifest.kernels} for x in (a, b))
    rows: dict[str, dict[str, Any]] = {}
    for side, entries, others in (("a", entries_a, entries_b), ("b", entries_b, entries_a)):
        for key, entry in entries.items():
            if key not in others:
                rows.setdefault(entry, {"entry": entry, "a": [], "b": []})[side].append(key)
    return list(rows.values())


def render(data: Mapping[str, Any], max_lines: int = 60) -> str:
    """Format the data of `diff`, at most `max_lines` lines per section. Lines start with "-" for A and "+" for B."""
    if data["same"]:
        return f"{data['a']} and {data['b']} are identical"
    out = [f"--- {data['a']}", f"+++ {data['b']}"]
    for name, lines in (
        ("about", _pairs(data.get("about", ()), str)),
        ("graphs", _graph_lines(data["graphs"])),
        ("choices", _choice_lines(data["choices"])),
        ("kernels", [f"  {r['entry']}: {_count(r['a'], '-')} {_count(r['b'], '+')}" for r in data.get("kernels", ())]),
        ("memory", _pairs(data.get("memory", ()), lambda n: "none" if n is None else size_text(n))),
        ("predicted time", _pairs(data.get("time", ()), lambda us: "none" if us is None else us_text(us))),
        ("weights", [f"  {r['count']} x {r['name']}: {r['how']}" for r in data.get("weights", ())]),
    ):
        out += [f"{name}:", *lines[:max_lines]] if lines else []
        out += [f"  ... and {len(lines) - max_lines} more lines (--all, --json)"] if len(lines) > max_lines else []
    return "\n".join(out)


def _pairs(rows: Sequence[Mapping[str, Any]], show: Any) -> list[str]:
    return [f"  {r['what']}: {show(r['a'])} -> {show(r['b'])}" for r in rows]


def _graph_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the changes of graphs; graphs with equal changes share one entry."""
    names_of: dict[str, list[str]] = {}
    texts: dict[str, list[str]] = {}
    for r in rows:
        key = json.dumps({k: v for k, v in r.items() if k != "graph"})
        names_of.setdefault(key, []).append(r["graph"])
        texts[key] = _graph(r)
    return [line for key, names in names_of.items() for line in (f"  @{', @'.join(names)}", *texts[key])]


def _graph(r: Mapping[str, Any]) -> list[str]:
    if "only" in r:
        return [f"    {'-' if r['only'] == 'a' else '+'} the whole graph"]
    lines = [
        f"    {'-' if c['side'] == 'a' else '+'} {c['count']} x {c['node']}" + (f"  // {c['loc']}" if c["loc"] else "")
        for c in r["changes"]
    ]
    return lines + ([f"    {r['wiring']}"] if r["wiring"] else [])


def _choice_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    for r in rows:
        where = f"  // {r['loc']}" if r["loc"] else ""
        out += [f"  @{r['graph']}: {r['count']} x {r['node']}{where}", f"    - {r['a']}", f"    + {r['b']}"]
    return out


def _count(keys: Sequence[str], sign: str) -> str:
    return f"{sign}{len(keys)}" + (f" ({', '.join(k[:8] for k in keys[:3])})" if keys else "")
