"""The command that a user runs after a compile."""

from __future__ import annotations

from pathlib import Path

from llmc.options import Options
from llmc.targets.target import Target


def next_command(model: Path, output: Path, o: Options, target: Target) -> str:
    """Return the suggested next command: pack the weights, or run the artifact ("" if no runtime supports it)."""
    if o.weights == "none":
        return f"next: llmc pack {output} {model}"
    return run_command(output, target.name, target.arch)


def run_command(artifact: Path, target: str, arch: str) -> str:
    """Return the command that runs an artifact with weights, or "" if no runtime supports its target."""
    family = target.partition(":")[0]
    if family == "hip":
        return ""
    machine = f", on a machine with an {arch} GPU" if family == "cuda" else ""
    return f"next{machine}: llmc-run {artifact} --prompt 'Hello'"
