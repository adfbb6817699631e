"""What this machine is: CPU features, cores and free memory, as Linux tells; and whether it can run a target."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo

# Families of architecture names: a target's arch begins with one of them, as does platform.machine().
_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"x86-64": "x86-64", "x86_64": "x86-64", "amd64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}
)
# What compilers call a feature, to what /proc/cpuinfo calls it.
_ALIASES: Mapping[str, str] = MappingProxyType({"lzcnt": "abm", "sse3": "pni", "sahf": "lahflm", "cmpxchg16b": "cx16"})


@dataclass(frozen=True)
class Host:
    """A machine: `machine` as platform.machine() says it, `features` as /proc/cpuinfo lists them."""

    machine: str
    features: frozenset[str]
    model: str = ""


def this_host(cpuinfo: Path = Path("/proc/cpuinfo")) -> Host:
    """The machine at hand; no features where /proc/cpuinfo cannot be read."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
        if not line.strip() and fields:
            break
    flags = fields.get("flags") or fields.get("Features") or ""
    return Host(platform.machine(), frozenset(flags.split()), fields.get("model name", ""))


def check_target(target: TargetInfo, host: Host) -> None:
    """LlmcError E109 where the artifact is for another kind of machine, E110 where this CPU lacks a feature."""
    if family(target.arch) != family(host.machine):
        cause = f"the artifact is for {target.arch} ({target.name}); this machine is {host.machine}"
        raise LlmcError("E109", cause, "recompile on this machine: llmc compile MODEL --target cpu:native")
    have = {_plain(f) for f in host.features}
    lacking = sorted(f for f in target.features if _plain(f) not in have)
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        cause = f"the artifact is for {target.name}; this CPU lacks {', '.join(lacking[:4])}{more}"
        raise LlmcError("E110", cause, "recompile for it: llmc compile MODEL --target cpu:native (or cpu:portable)")


def family(arch: str) -> str:
    """The architecture that a level or a machine name belongs to; the name itself where it is not a known one."""
    lowered = arch.lower()
    return next((f for prefix, f in _FAMILIES.items() if lowered.startswith(prefix)), lowered)


def _plain(feature: str) -> str:
    plain = feature.lower().replace("_", "").replace("-", "").replace(".", "")
    return _ALIASES.get(plain, plain)


def default_threads() -> int:
    """Physical cores that this process may use: its affinity, hyper-threads once, and the CPU quota of its cgroup."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_read(f"/sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list") or str(c) for c in cpus}
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return max(1, -(-int(words[0]) // int(words[1])))
    return 1 << 16


def free_memory() -> int:
    """Bytes that can be allocated without swapping: MemAvailable, and what the cgroup leaves."""
    free = 1 << 62
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used) + _cache()))
    return free


def _cache() -> int:
    """Bytes of file cache inside the cgroup: they are given back when needed."""
    lines: Iterable[str] = _read("/sys/fs/cgroup/memory.stat").splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("inactive_file ", "active_file ")))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
