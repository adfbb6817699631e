"""`llmc verify`: checks an artifact's hashes and kernels on this machine, and records or compares its canary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.exec import canary as canaries
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.load_executor import load_executor, load_kernels
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import CANARY, Folder
from llmc_runtime.format.manifest import Manifest

from llmc.artifact.amend import put_file
from llmc.artifact.integrity import find_damage

THREADS = 4


def verify_artifact(path: Path, record: bool = False, canary: bool = False) -> dict[str, Any]:
    """Check the artifact; in the result, "ok" is the verdict and "problems" lists the failures.

    record: run the artifact and write its canary, replacing an existing one. canary: compare with the recorded one. If
    the machine lacks the artifact's device, only the files are checked and "not_opened" has the reason; with `record`
    or `canary`, LlmcError E110 or E115 to E117 is raised instead. An unreadable manifest raises LlmcError E101 to E104.
    """
    begin = time.monotonic()
    folder = Folder(path)
    manifest = folder.manifest()
    problems = find_damage(folder, manifest, THREADS)
    result: dict[str, Any] = {
        "artifact": str(path),
        "digest": manifest.digest,
        "files": len(manifest.sizes),
        "bytes": sum(manifest.sizes.values()),
        "canary": {"state": "recorded" if CANARY in manifest.files else "absent"},
    }
    if not problems:
        try:
            result["canary"] |= _run(path, manifest, record, canary, problems)
        except LlmcError as error:
            if not error.of_environment:
                problems.append(error)
            elif record or canary:
                raise
            else:
                result["not_opened"] = f"LLMC-{error.code}: {error.cause}"
    result["problems"] = [{"code": e.code, "cause": e.cause, "remedy": e.remedy} for e in problems]
    result["ok"] = not problems
    if result["ok"]:
        result["digest"] = Folder(path).manifest().digest  # a recorded canary has changed it
    result["seconds"] = round(time.monotonic() - begin, 3)
    return result


def _run(path: Path, manifest: Manifest, record: bool, canary: bool, problems: list[LlmcError]) -> dict[str, Any]:
    """Load the artifact (of a draft model, only the kernels), and record or compare the canary.

    A failed comparison is appended to `problems`.
    """
    if manifest.weights.mode == "none":
        if record or canary:
            raise LlmcError("E111", f"{path} has no weights yet", f"run llmc pack {path} CHECKPOINT")
        return {}
    if manifest.is_draft_model:
        if record or canary:
            cause = f"{path} is a draft model, which generates no tokens to record"
            raise LlmcError("E208", cause, "record the canary of the model's artifact; drafts do not change its tokens")
        load_kernels(path)
        return {}
    if canary and not record and CANARY not in manifest.files:
        raise LlmcError("E126", f"{path} has no canary", f"run llmc verify --record {path} on a trusted machine")
    executor = load_executor(path)
    try:
        if record:
            return _record(path, executor)
        return _compare(executor, problems) if canary else {}
    finally:
        executor.close()


def _record(path: Path, executor: Executor) -> dict[str, Any]:
    recorded = canaries.record(executor)
    put_file(path, CANARY, recorded.dump())
    counts = {"prompts": len(recorded.runs), "tokens": sum(len(r.tokens) for r in recorded.runs)}
    return {"state": "recorded", **counts, "tolerance": recorded.tolerance, "device": dict(recorded.device)}


def _compare(executor: Executor, problems: list[LlmcError]) -> dict[str, Any]:
    recorded = canaries.Canary.load(executor.artifact.read(CANARY))
    verdict = canaries.check(executor, recorded)
    failed = canaries.failure(verdict, recorded, executor)
    problems += [failed] if failed else []
    state, devices = "failed" if failed else "passed", {"device": dict(executor.device.describe())}
    recorded_on = {"recorded_on": dict(recorded.device), "tolerance": recorded.tolerance}
    return {"state": state, **vars(verdict), "problems": list(verdict.problems), **devices, **recorded_on}


def render(result: Mapping[str, Any]) -> str:
    """Format the data of `verify_artifact` as text."""
    canary, problems = result["canary"], result["problems"]
    state = "no canary" if canary["state"] == "absent" else f"canary {canary['state']}"
    if "checked" in canary:
        state += f" ({canary['checked']} tokens, {canary['ties']} near ties, worst {canary['worst']:.3g} nats"
        state += f" of {canary['tolerance']:g} allowed)"
    elif "prompts" in canary:
        state += f" ({canary['prompts']} prompts, {canary['tokens']} tokens, tolerance {canary['tolerance']:g} nats)"
    lines = [
        f"{result['artifact']}: {result['files']} files, {result['bytes']} bytes, {state} ({result['seconds']:.2f} s)"
    ]
    lines += [f"LLMC-{p['code']}: {p['cause']}\n  Try: {p['remedy']}" for p in problems]
    if "not_opened" in result:
        lines.append(f"all hashes are correct; it was not opened on this machine: {result['not_opened']}")
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines.append(f"ok, digest {result['digest']}" if result["ok"] else count)
    return "\n".join(lines)
