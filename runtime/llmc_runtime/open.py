"""From an open artifact to a running engine: device, executor, scheduler, one caller's limits; it knows no text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.choose import open_device
from llmc_runtime.engine import Engine
from llmc_runtime.exec.canary import require
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.config import SchedulerConfig
from llmc_runtime.sched.scheduler import Scheduler

MOST_THREADS = 1024  # more only take turns, and a machine that starts a hundred thousand stands still


@dataclass(frozen=True)
class Limits:
    """What a caller asks for; None: what the artifact was compiled for. Nothing can be raised above that."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kv_bytes is not None and not isinstance(self.kv_bytes, int):
            object.__setattr__(self, "kv_bytes", whole("kv_cache_memory_bytes", self.kv_bytes))


@dataclass(frozen=True)
class Opened:
    """An engine that can run, one line about it, and how to give everything back."""

    engine: Engine
    summary: str
    close: Callable[[], None]
    stages: Mapping[str, float]  # seconds that each part took: device, weights, and where wanted canary, graphs


def open_engine(
    artifact: Artifact,
    limits: Limits,
    *,
    threads: int | None = None,
    seeds: Callable[[int], int],
    eos: Sequence[int] = (),
    prefix_caching: bool = True,
    policy: str = "fcfs",
    canary: bool = False,
    prepare: bool = False,
) -> Opened:
    """Load the artifact onto its device.

    `seeds(64)` draws a seed; `eos` ids end a text beside the manifest's; `prepare` builds all device graphs now, not
    each when it is needed first. LlmcError E107, E112 to E117 (device), E2xx (memory), E125 and E126 (`canary`: the
    recorded tokens differ here, or none were recorded).
    """
    manifest, marks = artifact.manifest, [("", time.monotonic())]
    device = open_device(artifact, threads)
    marks.append(("device", time.monotonic()))
    try:
        executor = Executor(artifact, device, limits.kv_bytes)
        marks.append(("weights", time.monotonic()))
        if canary:
            require(executor)
            marks.append(("canary", time.monotonic()))
        if prepare:
            executor.prepare()
            marks.append(("graphs", time.monotonic()))
        ends = dict.fromkeys([*manifest.eos_token_ids, *eos])
        config = SchedulerConfig(
            num_pages=executor.capacity.pages,
            page_size=manifest.kv.page_size,
            max_model_len=limit_of("max_model_len", limits.max_model_len, manifest.limits.max_model_len),
            max_num_seqs=limit_of("max_num_seqs", limits.max_num_seqs, manifest.limits.max_num_seqs),
            max_num_batched_tokens=limit_of(
                "max_num_batched_tokens", limits.max_num_batched_tokens, manifest.limits.max_num_batched_tokens
            ),
            vocab_size=manifest.vocab_size,
            eos_token_ids=tuple(i for i in ends if 0 <= i < manifest.vocab_size),
            policy=policy,
            prefix_caching=prefix_caching,
            context=artifact.digest,
        )
        engine = Engine(Scheduler(config, lambda: seeds(64)), executor)
    except BaseException:
        device.close()
        raise
    where = f"{manifest.target.name} on {device.name}" if device.separate else manifest.target.name
    part = f"NOT THE WHOLE MODEL, only {manifest.source.part}" if manifest.source.part else ""
    summary = ", ".join(filter(None, (part, where, str(executor.capacity), device.brought)))
    stages = {name: end - begin for (_, begin), (name, end) in pairwise(marks)}
    return Opened(engine, summary, executor.close, stages)


def whole(name: str, value: Any, most: int = (1 << 63) - 1) -> int | None:
    """`value` as an int of 1 to `most`, or None. LlmcError E201 where it is neither."""
    if value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise LlmcError("E201", f"{name} = {value!r:.60} is not possible", f"give {name} a whole number, 1 to {most}")
    return int(value)


def seed_of(value: Any) -> int:
    """`value` as a seed; None: one that is drawn now. LlmcError E201 where it is no integer of 64 bits."""
    if value is None:
        return secrets.randbits(63)
    if not isinstance(value, Integral) or isinstance(value, bool) or not -(1 << 63) <= int(value) < 1 << 64:
        raise LlmcError("E201", f"seed = {value!r:.60} is not possible", "give seed an integer of 64 bits, or None")
    return int(value)


def limit_of(name: str, wanted: Any, compiled: int) -> int:
    """The limit in force: what is wanted, at most what the artifact was compiled for. LlmcError E204."""
    if wanted is None:
        return compiled
    if not isinstance(wanted, Integral) or isinstance(wanted, bool) or not 1 <= int(wanted) <= compiled:
        flag = "--" + name.replace("_", "-")
        raise LlmcError(
            "E204",
            f"{name} = {wanted!r}; the artifact was compiled for 1 to {compiled}",
            f"a value up to {compiled}, or compile again with a larger {flag}",
        )
    return int(wanted)
