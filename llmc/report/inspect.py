"""`llmc inspect`: the contents of an artifact as plain data and as text. Checks sizes and the hashes of small files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc_runtime.format.folder import CANARY
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.names import DRAFT_MODEL, EAGLE, MTP
from llmc_runtime.format.nccl_call import uses_nccl
from llmc_runtime.format.program import Program, method_of
from llmc_runtime.format.size_text import size_text

from llmc.artifact.cost_report import memory
from llmc.ir.ops.comm import COLLECTIVES
from llmc.options import Options
from llmc.report.accuracy import accuracy_line
from llmc.report.launch_costs import step_sizes
from llmc.report.open_artifact import open_artifact


def inspect_artifact(path: Path, kv_bytes: int | None = None, kernels: int = 5) -> dict[str, Any]:
    """Return a description of the artifact.

    `kv_bytes` sizes the KV pool (None: every row at full length). `kernels` is the number of kernels per program to
    list, by predicted time. Raises LlmcError E101 to E108.
    """
    a = open_artifact(path)
    m = a.manifest
    read = sum(w.bytes for w in m.weights.of_rank(0))
    predicted = a.predictions().get("programs", {})
    return {
        "artifact": str(path),
        "digest": m.digest,
        "format": f"{m.format[0]}.{m.format[1]}",
        "compiler": m.compiler,
        "source": {"kind": m.source.kind, "name": m.source.name, "revision": m.source.revision, "part": m.source.part},
        "target": {"name": m.target.name, "arch": m.target.arch, "features": list(m.target.features)},
        "limits": dict(vars(m.limits)),
        "vocab_size": m.vocab_size,
        "generation": dict(m.generation),
        "deterministic": m.deterministic,
        "role": m.role,
        "canary": CANARY in m.files,
        "eval": a.reports.get("eval"),
        "compile": a.reports.get("compile", {}),
        "weights": {"mode": m.weights.mode, "bytes": m.weights.nbytes, "files": len(m.weights.files)},
        "bytes": sum(m.sizes.values()),
        "folders": _folders(m),
        "speculation": speculation_of(a.programs),
        "programs": [{**program_facts(p), "ranks": p.ranks} for p in a.programs],
        "ranks": m.ranks,
        "nccl": uses_nccl(m),
        "memory": memory(a.programs, m.states, read),
        "kv": kv_capacity(m, kv_bytes),
        "kernels": {"count": len(m.kernels), "largest": _largest(m, predicted, kernels), "licenses": _licenses(m)},
        "predicted_us": {n: prediction_facts(p) for n, p in predicted.items()},
    }


def kv_capacity(m: Manifest, kv_bytes: int | None) -> dict[str, Any]:
    """Return the KV pool of `kv_bytes` bytes, capped at (None: equal to) the size that all rows at full length use."""
    per_sequence = -(-m.limits.max_model_len // m.kv.page_size)
    useful = per_sequence * m.limits.max_num_seqs
    size = m.kv.bytes_per_page
    pages = useful if kv_bytes is None or not size else min(useful, kv_bytes // size)
    return {
        "dtype": m.kv.dtype,
        "layers": m.kv.layers,
        "page_size": m.kv.page_size,
        "bytes_per_page": size,
        "bytes_per_token": size // m.kv.page_size if m.kv.page_size else 0,
        "bytes": pages * size,
        "pages": pages,
        "tokens": pages * m.kv.page_size,
        "full_sequences": round(pages / per_sequence, 2),
        "bytes_for_all_rows": useful * size,
    }


def facts_of(m: Manifest) -> dict[str, Any]:
    """Return the facts about a finished artifact that a compile prints."""
    per_token = m.kv.bytes_per_page // max(1, m.kv.page_size)
    part = {"quick_build": f"{m.source.part} only, not the model"} if m.source.part else {}
    return {
        **part,
        "target": f"{m.target.name} ({', '.join([m.target.arch, *_num_features(m.target.features)])})",
        "size": f"{size_text(sum(m.sizes.values()))}, weights {size_text(m.weights.nbytes)}",
        "kernels": len(m.kernels),
        "limits": f"{m.limits.max_model_len} tokens per sequence, {m.limits.max_num_seqs} sequences, "
        f"{m.limits.max_num_batched_tokens} tokens per step",
        "kv_cache": f"{size_text(per_token)} per token, {size_text(per_token * m.limits.max_model_len)} per sequence",
    }


def _folders(m: Manifest) -> dict[str, Any]:
    out: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "bytes": 0})
    for name, size in m.sizes.items():
        part = out[name.partition("/")[0] if "/" in name else "."]
        part["files"] += 1
        part["bytes"] += size
    return dict(out)


def speculation_of(programs: Sequence[Program]) -> dict[str, Any]:
    """Return the maximum number of drafted tokens per row that a step verifies, and the methods that draft them."""
    drafts, method = max((p.drafts for p in programs), default=0), method_of(programs)
    names = {DRAFT_MODEL: "draft", EAGLE: "eagle", MTP: "mtp"}
    own = [names[method]] if method else []
    return {"drafts": drafts, "methods": ["ngram", "suffix", *own] if drafts else []}


def program_facts(p: Program) -> dict[str, Any]:
    """Return a program's name, sizes, number of launches and arena as data."""
    serves = {s: list(r) for s, r in p.serves.items()}
    return {"name": p.name, "serves": serves, "launches": len(p.launches), "arena_bytes": p.arena_bytes}


def prediction_facts(p: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a prediction, its microseconds, and those of them in collectives between ranks."""
    collectives = sum(x["us"] for x in p["launches"] if x["op"] in COLLECTIVES)
    return {"sizes": p["sizes"], "us": p["us"], "collectives_us": round(collectives, 3)}


def _largest(m: Manifest, predicted: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return every program's `count` slowest kernels, by predicted microseconds summed over their launches."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for program, prediction in predicted.items():
        for x in prediction["launches"]:
            row = rows.setdefault(
                (program, x["kernel"]),
                {"program": program, "op": x["op"], "kernel": x["kernel"], "loc": x["loc"], "launches": 0, "us": 0.0},
            )
            row["launches"] += 1
            row["us"] = round(row["us"] + x["us"], 3)
    sources = {k.hash: k.source for k in m.kernels}
    ranked = sorted(rows.values(), key=lambda r: (-r["us"], r["program"], r["kernel"]))
    largest = []
    for program in predicted:
        largest += [row for row in ranked if row["program"] == program][:count]
    return [{**row, "source": sources.get(row["kernel"], "")} for row in largest]


def _licenses(m: Manifest) -> dict[str, int]:
    """Return file -> number of kernels of the licences of other projects' kernels."""
    return dict(Counter(k.license for k in m.kernels if k.license))


def render(data: Mapping[str, Any]) -> str:
    """Format the data of `inspect_artifact` as text."""
    return "\n".join([*_summary_lines(data), *_optional_lines(data), *_kernel_lines(data)])


def _num_features(features: Sequence[str]) -> list[str]:
    """Return the number of features as text; an empty list for none."""
    noun = "feature" if len(features) == 1 else "features"
    return [f"{len(features)} {noun}"] if features else []


def _summary_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines that every artifact has: origin, limits, sizes and KV pool."""
    source, target, limits, kv, mem = (data[k] for k in ("source", "target", "limits", "kv", "memory"))
    weights = data["weights"]
    files = weights["files"]
    noun = "file" if files == 1 else "files"
    revision = f" @ {source['revision'][:12]}" if source["revision"] else ""
    part = f", ONLY {source['part']}" if source["part"] else ""
    features = "".join(f" ({n})" for n in _num_features(target["features"]))
    arena, snapshot = max(mem["arena_bytes"].values(), default=0), mem["bytes_per_snapshot"]
    return [
        f"{data['artifact']}: {source['name']}{revision}{part}, {size_text(data['bytes'])}, "
        f"digest {data['digest'][:16]}",
        f"  compiled by {data['compiler']}, format {data['format']}, for {target['name']}{features}",
        f"  limits    {limits['max_model_len']} tokens per sequence, {limits['max_num_seqs']} sequences, "
        f"{limits['max_num_batched_tokens']} tokens per step; vocabulary {data['vocab_size']}",
        f"  weights   {weights['mode']}, {size_text(weights['bytes'])} in {files} {noun}",
        f"  memory    arena {size_text(arena)}, states {size_text(sum(mem['state_bytes'].values()))}, plus the KV pool"
        f"{f' and snapshots of {size_text(snapshot)}' if snapshot else ''}",
        f"  KV pool   {size_text(kv['bytes'])}: {kv['tokens']} tokens in {kv['pages']} pages of {kv['page_size']} "
        f"({kv['dtype']}, {kv['layers']} layers, {size_text(kv['bytes_per_token'])} per token), "
        f"{kv['full_sequences']:g} full sequences",
    ]


def _optional_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines about recorded outputs and accuracy, and about what only some artifacts have."""
    lines = [
        f"  canary    {'recorded' if data['canary'] else 'not recorded (llmc verify --record)'}",
        f"  accuracy  {accuracy_line(data['eval']) if data['eval'] else 'not recorded (llmc eval --record)'}",
    ]
    if data["role"]:
        lines = ["  role      draft model of artifacts with this target and vocabulary and these limits"]
    if data["deterministic"]:
        lines.append("  results   deterministic: the same bits in every batch")
    if data["ranks"] > 1:
        mem = data["memory"]
        per_rank = f"{size_text(mem['weights_bytes'])} of weights, this memory and a KV pool of this size"
        if mem.get("group_bytes"):
            per_rank += f", and {size_text(mem['group_bytes'])} to exchange results"
        if data["nccl"]:
            per_rank += "; they exchange results by NCCL"
        lines.append(f"  ranks     {data['ranks']}, each with {per_rank}")
    if drafts := data["speculation"]["drafts"]:
        lines.append(f"  drafts    up to {drafts} per sequence, by {' or '.join(data['speculation']['methods'])}")
    if versions := data["compile"].get("versions"):
        lines.append("  versions  " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    if changed := _changed_options(data["compile"].get("options", {})):
        lines.append("  options   " + ", ".join(f"{k} {v}" for k, v in changed.items()))
    return lines + [f"  note      {note}" for note in data["compile"].get("notes", ())]


def _kernel_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the number of kernels, their licences, and the programs with the slowest kernels of each."""
    kernels = data["kernels"]
    order = "; below, the slowest of every program by predicted time" if kernels["largest"] else ""
    lines = [f"  kernels   {kernels['count']}{order}"]
    lines += [f"  licence   {file}: {count} of these kernels" for file, count in kernels["licenses"].items()]
    for program in data["programs"]:
        lines.append(_program_line(program, data["predicted_us"].get(program["name"])))
        lines += [
            f"    {row['us']:>10.1f} us  {row['launches']:>4} x {row['op']:<22} {row['source']}"
            for row in kernels["largest"]
            if row["program"] == program["name"]
        ]
    return lines


def _changed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded options of a compile that are not the defaults, without the limits, which have a line."""
    defaults = Options().recorded()
    other = {k: v for k, v in options.items() if not k.startswith("max_") and v not in (None, "")}
    return {k: v for k, v in other.items() if v != defaults.get(k)}


def _program_line(p: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> str:
    serves = ", ".join(f"{s} {lo}..{hi}" for s, (lo, hi) in p["serves"].items())
    line = f"  program   {p['name']} for {serves}: {p['launches']} launches, arena {size_text(p['arena_bytes'])}"
    if predicted:
        line += f"; predicted {predicted['us'] / 1000:.3f} ms at {step_sizes(predicted['sizes'])}"
        if predicted["collectives_us"]:
            line += f", of which collectives {predicted['collectives_us'] / 1000:.3f} ms"
    return line
