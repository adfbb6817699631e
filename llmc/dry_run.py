"""`llmc compile --dry-run`: predict programs, memory, speed and compile time without compiling a kernel."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_runtime.format.manifest import kv_of
from llmc_runtime.format.program import Program
from llmc_runtime.format.size_text import size_text

from llmc.artifact.cost_report import memory, roofline, weight_bytes
from llmc.artifact.write import states_of
from llmc.codegen.build import DryBuild, dry_build
from llmc.compilation import Compilation
from llmc.console import Console
from llmc.diagnostics import Diagnostic
from llmc.draft_model import add_draft, with_draft
from llmc.driver import start
from llmc.frontend.model_folder import has_weights
from llmc.frontend.safetensors_reader import TensorFiles
from llmc.options import Options
from llmc.quant.make.recipes import NONE, RECIPES
from llmc.quant.typed_weights import use_codes
from llmc.quantized_compile import planned_recipe, quantises_first, rounding_like
from llmc.report.formatting import count_text, us_text
from llmc.report.inspect import prediction_facts, program_facts

# Seconds per kernel on one core, and bytes of weights packed and written per second; measured on two cores, see
# bench/RESULTS.md.
KERNEL_S = (("triton", 0.55), ("cpp", 0.45))
WRITE_RATE = 0.5e9


def dry_run(model: str | Path, options: Options, memory_bytes: int | None, console: Console) -> dict[str, Any]:
    """Return the plan of a compile as data.

    Its keys are "model", "programs", "memory", "kv", "time" (predicted), "compile" (estimated) and "fits".
    `memory_bytes` is the device memory (None: the target's, see `Target.memory`), of which each rank on a CPU has an
    equal part; "memory", "kv" and "fits" are those of one rank. "fits" is whether weights, states, arena and one
    sequence of max_model_len tokens fit; it is None if the memory size is unknown. Raises the same errors as the stages
    of a compile before its kernels.
    """
    job = start(model, Path(os.devnull), replace(with_draft(options), weights="none"), False, console)
    with ExitStack() as stack:
        traced, checkpoint = _traced(job, options.weights == "packed", stack)
        add_draft(job, traced, stack, False)
        job.optimise(traced.module, traced.facts.max_positions)
        if checkpoint:
            job.weights(traced.module.graphs["weights"], checkpoint)  # checks and notes the scales of the KV cache
    cache = job.options.cache / "kernels" if job.options.cache else None
    built = dry_build(traced.module, job.target, cache, job.registry.kernels, job.registry.toolchains)
    job.done("plan", f"{len(built.keys)} kernels, of which {len(built.missing)} are not in the cache")
    weights = weight_bytes(built.programs)
    plan = {
        "model": _model(job, traced),
        "programs": [program_facts(p) for p in built.programs],
        "time": _times(built, job),
        "compile": _compile(built, job, weights * options.tensor_parallel_size, options.weights),
    }
    return plan | _memory(built, job, traced, weights, memory_bytes)


def _traced(job: Compilation, packed: bool, stack: ExitStack) -> tuple[Any, Any]:
    """Trace the model, and give its weights the types of a compile; also return the checkpoint if available.

    packed: whether the weights are part of the artifact; kernels of other artifacts read weights as they are
    traced, unless the pass `quantize` changes them. `stack` closes the checkpoint.
    """
    first, o = quantises_first(job.options), job.options
    has_weights_here = packed and _has_weights(job)
    if has_weights_here and not first:
        return job.opened(stack)
    traced = job.trace()
    if not packed or not (first or traced.source.config.get("quantization_config")):
        return traced, None
    if not has_weights_here:
        plan = "as if rounded to nearest" if first else "as if they were not quantised"
        job.note(f"the folder {job.model} lacks weights; they are planned {plan}")
        job.options = replace(o, quant=rounding_like(o.quant), calibrate=None) if first else o
        return traced, None
    from llmc.quant.make.planned import PlannedWeights  # imports torch

    use_codes(traced.module, PlannedWeights(traced.source, planned_recipe(o), traced), job.registry.opset())
    return traced, None


def _has_weights(job: Compilation) -> bool:
    """Whether the weights are in a local folder. A dry run downloads none, so those of a hub's model may be missing."""
    if not has_weights({p.name for p in job.model.iterdir()}):
        return False
    try:
        TensorFiles(job.model).close()
    except Diagnostic:
        if not job.origin.commit:
            raise
        return False
    return True


def _model(job: Compilation, traced: Any) -> dict[str, Any]:
    """Return the facts about the model that do not depend on the target's kernels."""
    facts = traced.facts
    sizes = [w.type.numel.const or 0 for name, w in traced.weights.items() if name not in traced.buffers]
    recipes = [f"{count} in {label}" for label, count in job.formats.items()]
    recipes += [planned_recipe(job.options).describe()] if job.options.quant != NONE else []
    head = job.options.quant_head
    recipes += [f"output projection: {RECIPES[head].describe()}"] if head != NONE else []
    return {
        "name": str(job.origin.name or job.model.resolve().name),
        "architecture": facts.architecture,
        "parameters": sum(sizes),
        "quantised": recipes,
        "dtype": facts.dtype,
        "layers": len(facts.heads),
        "target": job.target.name,
        "max_model_len": facts.max_positions,
        "max_num_seqs": job.rows,
        "max_num_batched_tokens": job.tokens,
        "ranks": job.options.tensor_parallel_size,
    }


def _times(built: DryBuild, job: Compilation) -> list[dict[str, Any]]:
    """Return the predicted microseconds per step of each program at typical sizes, with and without launch overhead."""
    predicted = roofline(built.programs, job.target)["programs"]
    rows = []
    for p in built.programs:
        us, sizes = predicted[p.name]["us"], predicted[p.name]["sizes"]
        floor = us - len(p.launches) * job.target.launch_us
        tokens = sizes.get("T", 1)
        rows.append(
            {
                "program": p.name, "kind": _kind(p), "tokens": tokens,
                "rows": sizes.get("R", 1),
                "us": us, "roofline_us": round(floor, 3), "tokens_per_second": round(tokens / us * 1e6, 1),
                "collectives_us": prediction_facts(predicted[p.name])["collectives_us"],
            }
        )  # fmt: skip
    return rows


def _kind(p: Program) -> str:
    """Describe the steps of a program."""
    if p.role:
        return "draft"
    if not p.uniform:
        return "prefill"
    if p.drafts:
        return "verify"
    return "plain" if p.is_plain else "decode"


def _compile(built: DryBuild, job: Compilation, weights: int, kind: str) -> dict[str, Any]:
    """Return the seconds per stage on this machine: measured for the stages that ran, estimated from benchmarks for the
    others.
    """
    spent = job.summary.seconds
    kernel_seconds = next(s for language, s in KERNEL_S if language in job.target.languages)
    jobs = max(1, min(os.cpu_count() or 1, 16))
    seconds = {
        "trace": spent["trace"],
        "passes": spent["passes"],
        "kernels": spent["plan"] + len(built.missing) * kernel_seconds / jobs,
        "weights": weights / WRITE_RATE if kind == "packed" else 0.0,
    }
    rounded = {k: round(v, 1) for k, v in seconds.items()}
    kernels = {"kernels": len(built.keys), "cached": len(built.keys) - len(built.missing)}
    return {**kernels, "seconds": rounded, "total": round(sum(seconds.values()), 1)}


def _memory(built: DryBuild, job: Compilation, traced: Any, weights: int, requested: int | None) -> dict[str, Any]:
    """Return the memory needed on the device and what remains for the KV cache, in bytes."""
    states = states_of(traced.module)
    needed = memory(built.programs, states, weights)
    kv = kv_of(states, job.target.page_size)
    arena, rows = max(needed["arena_bytes"].values(), default=0), sum(needed["state_bytes"].values())
    fixed = weights + arena + rows + needed["group_bytes"]
    device = job.target.memory if requested is None else requested
    if job.target.family == "cpu":
        device //= job.options.tensor_parallel_size
    limit = traced.facts.max_positions
    sequence = -(-limit // kv.page_size) * kv.bytes_per_page
    pages = max(0, device - fixed) // kv.bytes_per_page if kv.bytes_per_page else 0
    useful = job.rows * -(-limit // kv.page_size)
    tokens = min(pages, useful) * kv.page_size
    return {
        "memory": {
            "device": device, "given": requested is not None, "weights": weights, "arena": arena, "rows": rows,
            "group": needed["group_bytes"],
            "one_sequence": sequence, "needed": fixed + sequence, "left_for_kv": max(0, device - fixed),
        },
        "kv": {
            "dtype": kv.dtype, "layers": kv.layers, "page_size": kv.page_size,
            "bytes_per_token": kv.bytes_per_page // max(1, kv.page_size), "tokens": tokens,
            "sequences": round(tokens / limit, 2),
        },
        "fits": fixed + sequence <= device if device else None,
    }  # fmt: skip


def render(plan: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Format the plan as text; `argv` is the command line that requested it."""
    model, mem, kv, compiled = plan["model"], plan["memory"], plan["kv"], plan["compile"]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in compiled["seconds"].items())
    launches = sum(program["launches"] for program in plan["programs"])
    lines = [
        f"{model['name']} for {model['target']}: a plan; nothing was compiled",
        f"  model     {model['architecture']}, {model['layers']} layers, "
        f"{count_text(model['parameters'])} parameters, {model['dtype']}",
    ]
    if model["quantised"]:
        lines.append("  weights   " + "; ".join(model["quantised"]))
    lines.append(
        f"  limits    {model['max_model_len']} tokens per sequence, {model['max_num_seqs']} sequences, "
        f"{model['max_num_batched_tokens']} tokens per step"
    )
    if model["ranks"] > 1:
        lines.append(f"  ranks     {model['ranks']}, each with the memory and KV cache below")
    exchanged = f", exchanged between ranks {size_text(mem['group'])}" if mem["group"] else ""
    lines += [
        f"  programs  {len(plan['programs'])}, {launches} launches, {compiled['kernels']} kernels",
        f"  memory    weights {size_text(mem['weights'])}, rows {size_text(mem['rows'])}, "
        f"intermediate results {size_text(mem['arena'])}{exchanged}",
        f"  KV cache  {size_text(kv['bytes_per_token'])} per token ({kv['dtype']}, {kv['layers']} layers), "
        f"{size_text(mem['one_sequence'])} per sequence",
        *_fits(plan),
        *_time_lines(plan["time"]),
        f"  compile   about {compiled['total']:.0f} s here ({stages}); {compiled['cached']} of {compiled['kernels']} "
        "kernels are in the cache",
    ]
    if plan["fits"] is not False:
        lines.append(f"next: {_command(argv)}")
    return "\n".join(lines)


def _command(argv: Sequence[str]) -> str:
    """Return the command line that performs the planned compile."""
    p = ArgumentParser(add_help=False)
    p.add_argument("--dry-run", action="store_true")
    for option in ("--memory", "-o", "--output"):
        p.add_argument(option)
    parsed, rest = p.parse_known_args(argv)
    return shlex.join(["llmc", *rest, "-o", parsed.o or parsed.output or "model.llmc"])


def _fits(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines about fitting, with a remedy if the model does not fit."""
    mem, kv = plan["memory"], plan["kv"]
    if plan["fits"] is None:
        return ["  fits      unknown: the target has no memory size; pass --memory, for example --memory 24GiB"]
    source = "--memory" if mem["given"] else f"the smallest common {plan['model']['target']}"
    if plan["model"]["target"] == "cpu:native" and not mem["given"]:
        source = "this machine"
    if plan["model"]["ranks"] > 1:
        on_cpu = plan["model"]["target"].startswith("cpu:")
        source = f"a rank's part of {source}" if on_cpu else f"{source}, each rank's"
    memory = f"{size_text(mem['device'])} ({source})"
    if plan["fits"]:
        room = f"{kv['tokens']} tokens, {kv['sequences']:g} full sequences"
        return [f"  fits      yes, in {memory}; {size_text(mem['left_for_kv'])} remain for KV: {room}"]
    tokens = mem["left_for_kv"] // max(1, kv["bytes_per_token"])
    if tokens >= 2 * kv["page_size"]:
        remedy = f"--max-model-len {tokens // kv['page_size'] * kv['page_size']} fits"
    else:
        remedy = "use a device with more memory, or a smaller model"
    return [f"  fits      NO: one sequence needs {size_text(mem['needed'])} of {memory}", f"    Try: {remedy}"]


def _time_lines(rows: Any) -> list[str]:
    """Return one line per decode program, and one for the largest prefill program of at most 512 tokens."""
    decode = [r for r in rows if r["kind"] == "decode"]
    prefill = [r for r in rows if r["kind"] == "prefill"]
    shown = [r for r in prefill if r["tokens"] <= 512][-1:] or prefill[:1]
    lines = []
    for r in [*decode, *shown]:
        sizes = f"{r['tokens']} token{'s' if r['tokens'] > 1 else ''}, {r['rows']} row{'s' if r['rows'] > 1 else ''}"
        figures = f"{r['tokens_per_second']:,.0f} tokens/s; roofline {us_text(r['roofline_us'])}"
        if r["collectives_us"]:
            figures += f"; collectives {us_text(r['collectives_us'])}"
        lines.append(f"  {r['kind']:8}  predicted {us_text(r['us'])} per step of {sizes} ({figures})")
    return lines
