"""Properties of this machine on Linux: CPU features, cores and free memory; and the check of a target against them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError

if TYPE_CHECKING:
    from llmc_runtime.format.manifest import TargetInfo

# Prefix of an architecture or level, or value of platform.machine() -> architecture family.
_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"x86-64": "x86-64", "x86_64": "x86-64", "amd64": "x86-64", "aarch64": "aarch64", "arm64": "aarch64"}
)
# Feature names of compilers -> names in /proc/cpuinfo, where they differ.
_ALIASES: Mapping[str, str] = MappingProxyType({"lzcnt": "abm", "sse3": "pni", "sahf": "lahflm", "cmpxchg16b": "cx16"})


@dataclass(frozen=True)
class Host:
    """A machine: `machine` from platform.machine(), `features` and `model` from /proc/cpuinfo."""

    machine: str
    features: frozenset[str]
    model: str = ""


def this_host(cpuinfo: Path = Path("/proc/cpuinfo")) -> Host:
    """Describe this machine. `features` is empty if /proc/cpuinfo cannot be read."""
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
    import platform  # slow to import, and not needed by options

    return Host(platform.machine(), frozenset(flags.split()), fields.get("model name", ""))


def check_target(target: TargetInfo, host: Host) -> None:
    """Check that this CPU can run the target.

    Raises LlmcError E109 for another architecture, and E110 if the CPU lacks a required feature.
    """
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
    """Return the architecture family of a level or machine name; unknown names are returned in lower case."""
    lowered = arch.lower()
    return next((f for prefix, f in _FAMILIES.items() if lowered.startswith(prefix)), lowered)


def _plain(feature: str) -> str:
    plain = feature.lower().replace("_", "").replace("-", "").replace(".", "")
    return _ALIASES.get(plain, plain)


def default_threads() -> int:
    """Return the number of physical cores this process may use, by its CPU affinity and its cgroup's CPU quota."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {read_or_empty(topology.format(cpu)) or str(cpu) for cpu in _affinity()}
    return max(1, min(len(cores), _quota()))


def usable_cpus() -> int:
    """Return the number of logical CPUs this process may use, limited as `default_threads` is."""
    return max(1, min(len(_affinity()), _quota()))


def _affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _quota() -> int:
    quota, _, period = read_or_empty("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return max(1, -(-int(quota) // int(period)))
    return 1 << 16  # no quota


def meminfo(name: str) -> int | None:
    """Return an entry of /proc/meminfo in bytes, such as MemTotal; None if it is missing."""
    for line in read_or_empty("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping: MemAvailable, limited by the cgroup's memory limit."""
    available = meminfo("MemAvailable")
    free = 1 << 62 if available is None else available
    limit, used = read_or_empty("/sys/fs/cgroup/memory.max"), read_or_empty("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used) + _cache()))
    return free


def _cache() -> int:
    """Return the bytes of file cache in the cgroup, which the kernel reclaims on demand."""
    lines: Iterable[str] = read_or_empty("/sys/fs/cgroup/memory.stat").splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("inactive_file ", "active_file ")))


def read_or_empty(path: str) -> str:
    """Return the text of a file, stripped; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
