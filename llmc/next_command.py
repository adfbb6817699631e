"""The command that a user runs after a compile."""

from __future__ import annotations

from pathlib import Path

from llmc.frontend.tokenizer_files import TOKENIZER
from llmc.options import Options
from llmc.targets.target import Target


def next_command(model: Path, output: Path, o: Options, target: Target, task: str = "") -> str:
    """Return the suggested next command: pack the weights, or run the artifact.

    `model` is the folder of the model. Without a tokenizer the command generates from token ids. `task`: of a model
    that pools.
    """
    if o.weights == "none":
        return f"next: llmc pack {output} {model}"
    return run_command(output, target.name, target.arch, (model / TOKENIZER).exists(), task)


def run_command(artifact: Path, target: str, arch: str, tokenizer: bool = True, task: str = "") -> str:
    """Return the command that runs an artifact with weights."""
    article = "an" if arch.startswith("s") else "a"  # an sm_90, a gfx942
    machine = "" if target.startswith("cpu:") else f", on a machine with {article} {arch} GPU"
    command = f"llmc-run {artifact} {f'--{task} ' if task else ''}--prompt 'Hello'"
    if not tokenizer:
        method = task or "generate"
        command = f"""python -c "from llmc_runtime import LLM; print(LLM('{artifact}').{method}([[1, 2, 3]]))\""""
    return f"next{machine}: {command}"
