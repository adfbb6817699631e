"""`llmc-serve --dry-run`: reports what would be served, and whether it fits, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.api.llm import resolve
from llmc_runtime.artifact import Artifact, has_tokenizer
from llmc_runtime.collect_env import gpus
from llmc_runtime.compile_cache import is_id, is_source
from llmc_runtime.defaults import generation_of
from llmc_runtime.device.device import kv_share
from llmc_runtime.engine.loader import check_generates, limits_of, snapshots_of, speculation_of
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.buffer_layout import need_of
from llmc_runtime.exec.capacity import plan_kv
from llmc_runtime.exec.draft_artifact import open_with_draft
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import is_artifact
from llmc_runtime.format.program import method_of
from llmc_runtime.format.size_text import size_text
from llmc_runtime.host_info import free_memory
from llmc_runtime.server.openapi import description
from llmc_runtime.server.run_server import names_of
from llmc_runtime.server.server_options import Options
from llmc_runtime.text.chat_template import choose_template
from llmc_runtime.text.tokenizer import Tokenizer


def report_of(options: Options) -> dict[str, Any]:
    """Return the report with the keys "model", "artifact", "target", "memory", "kv", "limits", "server", "fits", "why".

    "fits" is None if it is unknown: the model is not compiled, or no GPU is visible. Raises the LlmcErrors of opening
    an artifact, and those of options that do not fit it (E201, E204, E206, E207, E612, E630) and of TLS (E649).
    """
    known = {name: value for name, value in options.engine.items() if name in EngineOptions.__dataclass_fields__}
    engine = EngineOptions(options.model, **known)
    defaults = engine.generation_config, engine.override_generation_config
    report: dict[str, Any] = {"model": options.model, "names": list(names_of(options))}
    folder = Path(options.model)
    if is_id(options.model) or (is_source(folder) and not is_artifact(folder)):
        generation_of({}, *defaults)
        why = f"it is compiled on the first start; llmc compile {options.model} --dry-run reports more"
        report |= {"compiled": False, "fits": None, "why": why}
    else:
        path = resolve(options.model, {}, None, lambda line: None)
        artifact = open_with_draft(path, engine.draft_model, verify=False)
        engine.check_artifact(artifact.manifest)
        generation_of(artifact.manifest.generation, *defaults)
        _check_drafts(artifact, engine)
        if options.chat_template is not None and has_tokenizer(artifact.manifest):
            choose_template(Tokenizer.open(artifact.tokenizer_dir).chat_templates, options.chat_template, None)
        report |= {"compiled": True, **_artifact(artifact, options)}
    if options.tls is not None:
        options.tls.context()
    return report | {"server": _server(options)}


def render(report: Mapping[str, Any]) -> str:
    """Format the report as text."""
    server = report["server"]
    scope = f" (for {server['api_key_scope']})" if server["api_keys"] else ""
    keys = f"{_count(server['api_keys'], 'API key')}{scope}, {_count(server['admin_keys'], 'admin key')}"
    fits = {True: "yes", False: "NO", None: "unknown"}[report["fits"]]
    return "\n".join(
        [
            f"{report['model']}, served as {', '.join(report['names'])}",
            *(_artifact_lines(report) if report["compiled"] else ()),
            f"  address   {server['address']}, {'TLS' if server['tls'] else 'no TLS'}, {keys}",
            f"  load      up to {server['max_num_queued_reqs']} queued sequences, "
            f"bodies of up to {size_text(server['max_body_bytes'])}",
            f"  routes    {' '.join(server['routes'])}",
            f"  fits      {fits}" + (f": {report['why']}" if report["why"] else ""),
        ]
    )


def _artifact_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report about a compiled artifact and its memory."""
    limits, kv, memory = report["limits"], report["kv"], report["memory"]
    free = "free memory unknown"
    if memory["free"] is not None:
        free = f"{size_text(memory['free'])} free on {memory['device']}"
    cache = "unknown"
    if kv is not None:
        cache = f"{kv['tokens']} tokens in {kv['pages']} pages of {kv['page_size']} ({size_text(kv['bytes'])}); "
        cache += f"{kv['concurrency_at_max_model_len']} sequences of maximum length at a time"
        if kv["state_snapshots"]:
            cache += f"; {kv['state_snapshots']} state snapshots ({size_text(kv['snapshot_bytes'])})"
    lines = [
        f"  model     {report['source']}, for {report['target']}, digest {report['digest'][:16]}",
        f"  memory    weights {size_text(memory['weights'])}, rows {size_text(memory['rows'])}, "
        f"intermediate results {size_text(memory['intermediate'])}; {free}",
        f"  limits    {limits['max_model_len']} tokens per sequence, {limits['max_num_seqs']} sequences, "
        f"{limits['max_num_batched_tokens']} tokens per step",
        f"  KV cache  {cache}",
    ]
    if report["ranks"] > 1:
        lines.append(f"  ranks     {report['ranks']}, each with this memory and KV cache")
    if report["data_parallel_size"] > 1:
        lines.append(f"  engines   {report['data_parallel_size']}, each with this KV cache and these limits")
    return lines


def _check_drafts(artifact: Artifact, engine: EngineOptions) -> None:
    """Raise LlmcError E204 or E206 if the artifact cannot draft tokens as requested."""
    drafts, method = max((program.drafts for program in artifact.programs), default=0), method_of(artifact.programs)
    check_generates(engine.speculate, artifact.manifest.pooling)
    speculation_of(engine.speculate, drafts, rows=int(bool(method)), available=method)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _artifact(artifact: Artifact, options: Options) -> dict[str, Any]:
    """Return the facts about an artifact, the memory that its engines need, and whether they fit ("why": a reason)."""
    m, engine = artifact.manifest, options.engine
    limits = limits_of(m, engine.get)
    need = need_of(artifact)
    free, device = _device(m.target.name)
    engines, on_cpu = engine.get("data_parallel_size", 1), m.target.name.startswith("cpu")
    memory = {"weights": need.weights, "rows": need.states, "intermediate": need.arena, "free": free, "device": device}
    report: dict[str, Any] = {
        "source": m.source.name, "target": m.target.name, "digest": m.digest, "limits": limits, "memory": memory,
        "data_parallel_size": engines, "ranks": m.ranks, "kv": None, "fits": None, "why": "",
    }  # fmt: skip
    if m.weights.mode == "none":
        return report | {"fits": False, "why": f"it has no weights yet: llmc pack {options.model} CHECKPOINT"}
    kv_bytes = engine.get("kv_cache_memory_bytes")
    if free is None and kv_bytes is None:
        return report | {"why": "no GPU is visible; --kv-cache-memory-bytes sets the size of the KV cache without one"}
    try:
        share = kv_share(not on_cpu, engines * m.ranks)
        snapshots = snapshots_of(m, engine.get("enable_prefix_caching"), engine.get("state_snapshots"))
        kv = plan_kv(m, kv_bytes, (1 << 60) if free is None else free, share, need, snapshots)
    except LlmcError as e:
        return report | {"fits": False, "why": f"{e.cause}. Try: {e.remedy}"}
    pages_per_sequence = -(-limits["max_model_len"] // kv.page_size)
    report["kv"] = {
        "bytes": kv.nbytes, "pages": kv.pages, "page_size": kv.page_size, "tokens": kv.tokens,
        "concurrency_at_max_model_len": min(limits["max_num_seqs"], kv.pages // pages_per_sequence),
        "state_snapshots": kv.snapshots, "snapshot_bytes": kv.snapshot_bytes,
    }  # fmt: skip
    caches = kv.nbytes + kv.snapshot_bytes
    total = need.total + caches  # bytes per device
    if on_cpu:  # all engines use the same memory, and share the weights
        total += (engines - 1) * (need.total - need.weights + caches)
    if free is None:
        return report | {"why": f"{size_text(total)} are needed, and no GPU is visible"}
    return report | {"fits": total <= free, "why": f"{size_text(total)} of {size_text(free)}"}


def _device(target: str) -> tuple[int | None, str]:
    """Return the free memory in bytes and the device's name, as far as known without opening the device."""
    if target.startswith("cpu"):
        return free_memory(), "this machine"
    visible = gpus() if target.startswith("cuda") else []
    if not visible or not visible[0]["memory.free"].isdigit():
        return None, ""
    return int(visible[0]["memory.free"]) << 20, visible[0]["name"]


def _server(options: Options) -> dict[str, Any]:
    scheme = "http" if options.tls is None else "https"
    address = f"unix socket {options.uds}" if options.uds else f"{scheme}://{options.host}:{options.port}"
    routes = [*description()["paths"], *(["/admin/*"] if options.admin_keys else [])]
    return {
        "address": address, "tls": options.tls is not None, "api_keys": len(set(options.keys)),
        "api_key_scope": options.key_scope, "admin_keys": len(set(options.admin_keys)),
        "max_num_queued_reqs": options.max_queued_requests, "max_num_queued_tokens": options.max_queued_tokens,
        "max_num_reqs_per_key": options.max_per_key, "max_body_bytes": options.max_body, "routes": routes,
    }  # fmt: skip
