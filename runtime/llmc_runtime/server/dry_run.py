"""`llmc-serve --dry-run`: reports what would be served, what it needs, and whether it fits, without loading the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.api.llm import resolve
from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.collect_env import gpus
from llmc_runtime.compile_cache import is_id
from llmc_runtime.engine.loader import limit_of
from llmc_runtime.exec.buffer_layout import need_of
from llmc_runtime.exec.capacity import KvCapacity, human, plan_kv
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.host_info import free_memory
from llmc_runtime.server.run_server import names_of, require_packages
from llmc_runtime.server.server_options import Options

_GPU_SHARE, _CPU_SHARE = 0.9, 0.5  # share of the free memory for the KV cache, equal to the devices' defaults


def plan(options: Options) -> dict[str, Any]:
    """Return the report with the keys "model", "artifact", "target", "memory", "kv", "limits", "server", "fits", "why".

    "fits" is None if it is unknown: the model is not compiled, or no GPU is visible. Raises the LlmcErrors of opening
    an artifact, and E204, E649 and E665.
    """
    require_packages()
    told: dict[str, Any] = {"model": options.model, "names": list(names_of(options))}
    folder = Path(options.model)
    if is_id(options.model) or ((folder / "config.json").is_file() and not (folder / "manifest.json").is_file()):
        command = f"llmc compile {options.model} --dry-run"
        told |= {"compiled": False, "fits": None, "why": f"it is compiled on the first start; {command} tells more"}
    else:
        found = open_artifact(resolve(options.model, {}, None, lambda line: None), verify=False)
        told |= {"compiled": True, **_artifact(found, options)}
    if options.tls is not None:
        options.tls.context()
    return told | {"server": _server(options)}


def render(told: Mapping[str, Any]) -> str:
    """Format the report as text."""
    lines = [f"{told['model']}, served as {', '.join(told['names'])}"]
    if told["compiled"]:
        limits, kv, memory = told["limits"], told["kv"], told["memory"]
        lines += [
            f"  model     {told['source']}, for {told['target']}, digest {told['digest'][:16]}",
            f"  memory    weights {human(memory['weights'])}, rows {human(memory['rows'])}, "
            f"intermediate results {human(memory['intermediate'])}; {_free(memory)}",
            f"  limits    {limits['max_model_len']} tokens a sequence, {limits['max_num_seqs']} sequences, "
            f"{limits['max_num_batched_tokens']} tokens a step",
            f"  KV cache  {_kv(kv)}",
        ]
    server = told["server"]
    keys = f"{server['api_keys']} API keys (for {server['api_key_scope']}), {server['admin_keys']} admin keys"
    lines += [
        f"  listens   {server['address']}, {'TLS' if server['tls'] else 'no TLS'}, {keys}",
        f"  load      {server['max_num_queued_reqs']} sequences wait, bodies of {human(server['max_body_bytes'])}",
        f"  routes    {' '.join(server['routes'])}",
    ]
    word = {True: "yes", False: "NO", None: "not known"}[told["fits"]]
    lines.append(f"  fits      {word}" + (f": {told['why']}" if told["why"] else ""))
    return "\n".join(lines)


def _artifact(artifact: Artifact, options: Options) -> dict[str, Any]:
    m, engine = artifact.manifest, options.engine
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    limits = {name: limit_of(name, engine.get(name), getattr(m.limits, name)) for name in names}
    need = need_of(artifact)
    free, where = _device(m.target.name)
    memory = {"weights": need.weights, "rows": need.states, "intermediate": need.arena, "free": free, "device": where}
    told: dict[str, Any] = {
        "source": m.source.name, "target": m.target.name, "digest": m.digest, "limits": limits, "memory": memory,
        "kv": None, "fits": None, "why": "",
    }  # fmt: skip
    if m.weights.mode == "none":
        return told | {"fits": False, "why": f"it has no weights yet: llmc pack {options.model} CHECKPOINT"}
    kv_bytes = engine.get("kv_cache_memory_bytes")
    if free is None and kv_bytes is None:
        return told | {"why": "no GPU is in sight; --kv-cache-memory-bytes tells the KV cache's size anywhere"}
    try:
        share = _CPU_SHARE if m.target.name.startswith("cpu") else _GPU_SHARE
        capacity = plan_kv(m, kv_bytes, (1 << 60) if free is None else free, share, need)
    except LlmcError as e:
        return told | {"fits": False, "why": f"{e.cause}. Try: {e.remedy}"}
    whole = need.total + capacity.nbytes
    told["kv"] = _capacity(capacity, limits)
    if free is None:
        return told | {"why": f"{human(whole)} are needed, and no GPU is in sight"}
    return told | {"fits": whole <= free, "why": f"{human(whole)} of {human(free)}"}


def _capacity(kv: KvCapacity, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the size of the KV cache, and how many sequences of maximum length it can hold concurrently."""
    pages = -(-limits["max_model_len"] // kv.page_size)
    most = min(limits["max_num_seqs"], kv.pages // pages)
    sizes = {"bytes": kv.nbytes, "pages": kv.pages, "page_size": kv.page_size, "tokens": kv.tokens}
    return {**sizes, "concurrency_at_max_model_len": most}


def _device(target: str) -> tuple[int | None, str]:
    """Return the free memory in bytes and the device's name, as far as known without opening the device."""
    if target.startswith("cpu"):
        return free_memory(), "this machine"
    found = gpus() if target.startswith("cuda") else []
    if not found or not found[0]["memory.free"].isdigit():
        return None, ""
    return int(found[0]["memory.free"]) << 20, found[0]["name"]


def _server(options: Options) -> dict[str, Any]:
    from llmc_runtime.server.openapi import description

    scheme = "http" if options.tls is None else "https"
    address = f"unix socket {options.uds}" if options.uds else f"{scheme}://{options.host}:{options.port}"
    routes = [*description()["paths"], *(["/admin/*"] if options.admin_keys else [])]
    return {
        "address": address, "tls": options.tls is not None, "api_keys": len(set(options.keys)),
        "api_key_scope": options.key_scope,
        "admin_keys": len(set(options.admin_keys)), "max_num_queued_reqs": options.max_queued_requests,
        "max_num_queued_tokens": options.max_queued_tokens, "max_num_reqs_per_key": options.max_per_key,
        "max_body_bytes": options.max_body, "routes": routes,
    }  # fmt: skip


def _free(memory: Mapping[str, Any]) -> str:
    return (
        "nobody to ask what is free"
        if memory["free"] is None
        else f"{human(memory['free'])} free on {memory['device']}"
    )


def _kv(kv: Mapping[str, Any] | None) -> str:
    if kv is None:
        return "not known"
    whole = f"{kv['tokens']} tokens in {kv['pages']} pages of {kv['page_size']} ({human(kv['bytes'])})"
    return f"{whole}; {kv['concurrency_at_max_model_len']} sequences of the greatest length at a time"
