"""Makes an engine from an artifact: opens the device, loads the weights, sets up executor and scheduler.

Functions import what only some options need, so that an engine without them starts faster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine_options import RAY, SIZES, EngineOptions
from llmc_runtime.exec.load_executor import make_executor, release, start_ranks
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.names import DRAFT_MODEL, EAGLE, MTP
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.program import PLAIN_STEP, method_of
from llmc_runtime.format.size_text import size_text
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.speculate_option import DEFAULT_DRAFTS, DEFAULTS, HIGH, KEYS, LOW, NGRAM, TOKENS

if TYPE_CHECKING:
    from llmc_runtime.exec.capacity import KvCapacity
    from llmc_runtime.exec.executor import Executor
    from llmc_runtime.exec.rank_group import RankGroup
    from llmc_runtime.sched.host_draft import Draft
    from llmc_runtime.sched.speculation_config import SpeculationConfig
    from llmc_runtime.trace import Trace

# Methods for which an artifact has programs: what drafts, and the argument of --draft.
NEEDS = MappingProxyType(
    {
        DRAFT_MODEL: ("a draft model", "MODEL"),
        EAGLE: ("an EAGLE-3 head", "eagle:PATH"),
        MTP: ("a multi-token-prediction layer", "mtp"),
    }
)
_HEADS = MappingProxyType({EAGLE: "eagle", MTP: "mtp"})  # methods of heads, which an artifact has one of


@dataclass(frozen=True)
class Opened:
    """An open engine.

    summary:  one log line about it
    close:    frees the device, and writes the trace
    stages:   duration in seconds of "device", "weights" and, if requested, "canary" and "graphs"
    trace:    records the engine's steps, if requested
    group:    the other ranks, if the artifact has several
    """

    engine: Engine
    summary: str
    close: Callable[[], None]
    stages: Mapping[str, float]
    trace: Trace | None = None
    group: RankGroup | None = None


def open_engine(artifact: Artifact, options: EngineOptions, eos: Sequence[int] = (), number: int = 0) -> Opened:
    """Load the artifact onto its device. `eos` are end-of-sequence tokens besides the manifest's.

    Of several engines, the one with this `number` uses the GPU with this number; on a CPU, each gets an equal part of
    the default numbers of threads and bytes.

    `options.prepare` builds all device graphs now instead of each on first use. Raises LlmcError E107, E112 to E117
    (device), E140 to E142 (Ray), E2xx (memory, limits and drafts), E125 and E126 (`options.canary`: tokens differ from
    the recorded ones, or none are recorded).
    """
    manifest, marks = artifact.manifest, [("", time.monotonic())]
    threads = options.rank_threads(manifest.ranks)
    ray = options.distributed_executor_backend == RAY
    group = start_ranks(artifact, threads, options.verify, ray, number, options.heartbeat_timeout)
    device: Device | None = None
    try:
        member = group.member if group else None
        device = open_device(artifact, threads, index=number, engines=options.data_parallel_size, member=member)
        marks.append(("device", time.monotonic()))
        snapshots = snapshots_of(manifest, options.enable_prefix_caching, options.state_snapshots)
        executor = make_executor(artifact, device, group, options.kv_cache_memory_bytes, snapshots)
        marks.append(("weights", time.monotonic()))
        if options.canary:
            from llmc_runtime.exec.canary import require

            require(executor)
            marks.append(("canary", time.monotonic()))
        if options.prepare:
            executor.prepare()
            marks.append(("graphs", time.monotonic()))
        config = _scheduler_config(artifact, options, executor, eos)
        draw = random.Random(f"{options.seed} {number}" if number else options.seed)
        engine = Engine(Scheduler(config, lambda: draw.getrandbits(64), draft=_draft(config)), executor)
        trace = _trace(engine, options)
    except BaseException:
        release(device, group)
        raise

    def close() -> None:
        executor.close()
        if trace is not None:
            trace.finish()

    summary = _summary(manifest, device, config, executor.capacity, threads if group else None)
    stages = {name: end - begin for (_, begin), (name, end) in pairwise(marks)}
    return Opened(engine, summary, close, stages, trace, group)


def _draft(config: SchedulerConfig) -> Draft | None:
    """Return what drafts on the host, if anything does. Raises LlmcError E206."""
    if config.speculation is None or not config.speculation.host:
        return None
    from llmc_runtime.sched.draft_methods import open_draft

    return open_draft(config.speculation.host)


def _trace(engine: Engine, options: EngineOptions) -> Trace | None:
    """Trace the engine, if requested. Raises LlmcError E645."""
    if options.trace is None:
        return None
    from llmc_runtime.trace import attach_trace

    return attach_trace(engine, options.trace)


def _summary(
    manifest: Manifest, device: Device, config: SchedulerConfig, capacity: KvCapacity, rank_threads: int | None
) -> str:
    """Describe an open engine in one line. `rank_threads`: threads of each rank, None without ranks."""
    target, speculation = manifest.target.name, config.speculation
    ranks = ""
    if rank_threads is not None:
        ranks = f"{manifest.ranks} ranks" + ("" if device.separate else f" of {rank_threads} threads each")
    parts = (
        f"NOT THE WHOLE MODEL, only {manifest.source.part}" if manifest.source.part else "",
        f"{target} on {device.name}" if device.separate else target,
        ranks,
        str(capacity),
        "no prefix caching" if manifest.recurrent and not config.prefix_caching else "",
        f"target of prompt steps: {1e3 * config.target_itl:g} ms" if config.target_itl else "",
        f"up to {speculation.num_tokens} drafted tokens ({speculation.method})" if speculation else "",
        device.upload_summary,
    )
    return ", ".join(filter(None, parts))


def _scheduler_config(
    artifact: Artifact, options: EngineOptions, executor: Executor, eos: Sequence[int]
) -> SchedulerConfig:
    """Return the scheduler's limits. Raises LlmcErrors E2xx for options that the artifact does not support."""
    manifest = artifact.manifest
    pooling = manifest.pooling
    check_generates(options.speculate, pooling)
    caching = _prefix_caching(manifest, options.enable_prefix_caching)
    snapshots = executor.capacity.snapshots
    if manifest.recurrent and not snapshots:
        if options.enable_prefix_caching:
            cause = f"enable_prefix_caching: no state snapshot of {size_text(manifest.bytes_per_snapshot)} fits"
            raise LlmcError("E205", cause, "leave enable_prefix_caching out, or stop other programs on the device")
        caching = False
    eos_token_ids = dict.fromkeys([*manifest.eos_token_ids, *eos])
    return SchedulerConfig(
        num_pages=executor.capacity.pages,
        page_size=manifest.kv.page_size,
        **limits_of(manifest, lambda name: getattr(options, name)),
        vocab_size=manifest.vocab_size * (pooling.segments if pooling else 1),
        eos_token_ids=tuple(i for i in eos_token_ids if 0 <= i < manifest.vocab_size),
        policy=options.scheduling_policy,
        prefix_caching=caching,
        snapshots=snapshots if manifest.recurrent else None,
        context=artifact.digest,
        speculation=speculation_of(
            options.speculate,
            executor.max_drafts,
            executor.draft_model.max_rows,
            method_of(artifact.programs),
            executor.draft_model.stops,
            any(program.name.startswith(PLAIN_STEP) for program in artifact.programs),
        ),
        max_num_logits=executor.max_entries,
        max_masks=executor.rows.masks or 1,
        pooling=pooling,
        target_itl=0.0 if pooling else (options.target_itl_ms or 0.0) / 1e3,
    )


def _prefix_caching(manifest: Manifest, requested: bool | None) -> bool:
    """Return whether the KV cache of common prefixes is reused."""
    return requested is not False and not (manifest.pooling and manifest.pooling.whole)


def snapshots_of(manifest: Manifest, caching: bool | None, requested: int | None) -> int | None:
    """Return the number of snapshots of recurrent layers' states, None for the default; prefixes are reused only at
    snapshots. `caching` and `requested` are the options `enable_prefix_caching` and `state_snapshots`.

    Raises LlmcError E204 if they contradict each other or the model.
    """
    if requested and not manifest.recurrent:
        cause = f"state_snapshots = {requested}, and the model has no recurrent layers"
        raise LlmcError("E204", cause, "leave state_snapshots out")
    if requested == 0 and caching and manifest.recurrent:
        cause = "enable_prefix_caching: the model has recurrent layers, and state_snapshots = 0 keeps no states of them"
        raise LlmcError("E204", cause, "leave state_snapshots or enable_prefix_caching out")
    return requested if _prefix_caching(manifest, caching) else 0


def check_generates(option: Any, pooling: Pooling | None) -> None:
    """Raise LlmcError E204 if the option `speculate` is set for a model that pools."""
    if option is not None and pooling is not None:
        cause = "speculate: the model pools its prompts and generates nothing"
        raise LlmcError("E204", cause, "start without speculation")


def speculation_of(
    option: Any, compiled: int, rows: int = 0, available: str = "", stops: bool = False, skips_prompts: bool = False
) -> SpeculationConfig | None:
    """Return how tokens are drafted, from the normal form of the option `speculate`.

    `available` is the method of the artifact's draft model, head or layer, "" without one, and `rows` the maximum
    number of rows for which it drafts. `stops`, `skips_prompts`: see SpeculationConfig. Raises LlmcError E204 if the
    artifact verifies at most `compiled` drafted tokens, and more are requested, and E206 if the method needs a draft
    model, a head or a layer, and the artifact does not have it.
    """
    if option is None:
        return None
    from llmc_runtime.sched.speculation_config import SpeculationConfig

    method, requested = option["method"], option[TOKENS]
    if not compiled or (requested or 1) > compiled:
        raise _too_many_drafts(method, requested, compiled, available)
    num_tokens = requested or compiled
    if method not in KEYS:
        return SpeculationConfig(num_tokens, host=method)
    if method == NGRAM:
        return SpeculationConfig(num_tokens, option[LOW], option[HIGH])
    if not rows or method != available:
        raise _lacks_method(method, available, drafts=rows > 0)
    head = _HEADS.get(method, "")
    looks_first = head and stops
    return SpeculationConfig(
        num_tokens,
        min_ngram=DEFAULTS[LOW] if looks_first else 0,
        max_ngram=DEFAULTS[HIGH] if looks_first else 0,
        max_rows=rows,
        head=head,
        stops=stops,
        skips_prompts=skips_prompts,
    )


def _too_many_drafts(method: str, requested: int | None, compiled: int, available: str) -> LlmcError:
    """Return LlmcError E204: the artifact verifies at most `compiled` drafted tokens (see speculation_of)."""
    draft = f"--draft {NEEDS[method][1]} " if method in NEEDS and method != available else ""
    remedy = f"compile again with {draft}--speculate {requested or DEFAULT_DRAFTS}, or start without speculation"
    if not compiled:
        cause = "speculate: the artifact was compiled without --speculate, and verifies no drafted tokens"
        return LlmcError("E204", cause, remedy)
    cause = f"speculate requests {requested} drafted tokens, and the artifact was compiled for at most {compiled}"
    return LlmcError("E204", cause, f"use up to {compiled}, or {remedy}")


def _lacks_method(method: str, available: str, drafts: bool) -> LlmcError:
    """Return LlmcError E206: the artifact does not have what a method needs.

    `available` is the method that it has, "" without one, and `drafts` whether its programs draft for any row.
    """
    source, flag = NEEDS[method]
    existing, usable = "none", NGRAM
    if available and drafts:
        existing, usable = f"{NEEDS[available][0]} instead", f"{available} or {NGRAM}"
    other_artifact = "start with --draft-model ARTIFACT, " if method == DRAFT_MODEL and not available else ""
    cause = f"speculate: the method {method} needs {source}, and the artifact has {existing}"
    return LlmcError("E206", cause, f"compile again with --draft {flag}, {other_artifact}or use {usable}")


def limits_of(manifest: Manifest, option: Callable[[str], Any]) -> dict[str, int]:
    """Return max_model_len, max_num_seqs and max_num_batched_tokens. `option` returns the option with such a name.

    Raises LlmcError E204 for a value that is not from 1 to the artifact's own.
    """
    return {name: _limit(name, option(name), getattr(manifest.limits, name)) for name in SIZES}


def _limit(name: str, value: Any, compiled: int) -> int:
    """Return `value`, or `compiled` if it is None. Raises LlmcError E204 unless it is from 1 to `compiled`."""
    if value is None:
        return compiled
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= compiled:
        flag = "--" + name.replace("_", "-")
        raise LlmcError(
            "E204",
            f"{name} = {value!r}; the artifact was compiled for 1 to {compiled}",
            f"use a value up to {compiled}, or compile again with a larger {flag}",
        )
    return int(value)
