"""Describes machine and installation for bug reports: versions, CPU, GPUs, packages. Opens no device.

The report has no paths, no names of users or hosts, and of environment variables only those that select devices.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from llmc_runtime import __version__
from llmc_runtime.format.manifest import MAJOR, MINOR
from llmc_runtime.host_info import default_threads, free_memory, meminfo, read_or_empty, this_host

PACKAGES = (
    "numpy", "tokenizers", "jinja2", "tqdm", "torch", "transformers", "ml_dtypes", "safetensors", "huggingface-hub",
    "triton", "nvidia-cuda-nvrtc", "nvidia-cutlass-dsl", "flash-attn-4", "flashinfer-python", "cuda-bindings",
    "hip-python", "llguidance", "starlette", "uvicorn", "h11", "pyzmq", "ray", "msgspec", "prometheus-client", "pyyaml",
    "openai",
)  # fmt: skip
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SHOWN_AS_SET = ("LLMC_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "PYTHONPATH")
_TIMEOUT_SECONDS = 5.0  # seconds for a program that prints its version
_GPU = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")


def collect(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the report as JSON data. `environment` holds the environment variables."""
    return {
        "llmc": {"version": __version__, "artifact_format": f"{MAJOR}.{MINOR}"},
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "system": _system(),
        "cpu": _cpu(),
        "memory": {"total_mib": (meminfo("MemTotal") or 0) >> 20, "available_mib": free_memory() >> 20},
        "gpu": {"devices": gpus(), "driver": _drivers()},
        "programs": {name: _first_line([name, "--version"]) for name in ("c++", "nvcc", "hipcc")},
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: environment[name] for name in _DEVICES if name in environment}
        | {name: "set" for name in _SHOWN_AS_SET if name in environment},
    }


def render(report: Mapping[str, Any]) -> str:
    """Return the report of `collect` as text. Empty values are left out; packages that are missing are listed."""
    packages = report["packages"]
    lines = []
    for part, facts in report.items():
        if part == "packages":
            lines += ["packages", *(f"  {name:<20} {version}" for name, version in packages.items() if version)]
            lines.append(f"  not installed: {', '.join(name for name, version in packages.items() if not version)}")
            continue
        values = [f"  {name:<20} {_text_of(value)}" for name, value in facts.items() if value]
        lines += [part, *values] if values else []
    return "\n".join(lines)


def gpus() -> list[dict[str, str]]:
    """Return the NVIDIA GPUs that nvidia-smi lists, with name, memory.total and memory.free in MiB, driver_version and
    compute_cap. Empty if nvidia-smi is missing or fails."""
    text = _output(["nvidia-smi", f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(_GPU, row)) for row in rows if len(row) == len(_GPU)]


def _system() -> dict[str, str]:
    release: Mapping[str, str] = {}
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        pass
    libc = " ".join(platform.libc_ver())
    name = release.get("PRETTY_NAME", platform.system())
    return {"os": name, "kernel": platform.release(), "libc": libc, "machine": platform.machine()}


def _cpu() -> dict[str, Any]:
    host = this_host()
    features = [name for name in _FEATURES if name in host.features]
    return {"model": host.model or platform.processor(), "physical_cores": default_threads(), "features": features}


def _drivers() -> dict[str, str]:
    """Return the versions of the loaded kernel modules, by vendor."""
    nvidia = read_or_empty("/proc/driver/nvidia/version").splitlines()
    versions = {"nvidia": nvidia[0] if nvidia else "", "amd": read_or_empty("/sys/module/amdgpu/version")}
    return {name: version for name, version in versions.items() if version}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: Sequence[str]) -> str | None:
    lines = [line.strip() for line in _output(command).splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]  # the first lines of nvcc are a copyright notice
    return next(iter(release or lines), None)


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text_of(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_text_of, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text_of(entry)}" for name, entry in value.items())
    return str(value)
