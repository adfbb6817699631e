"""What a start imports, by the names of modules: nothing that only other requests, options or devices need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Modules, and packages with all of their modules.
OF_OTHERS = (
    "argparse", "difflib", "statistics", "subprocess",
    "llmc_runtime.api.async_llm", "llmc_runtime.cli", "llmc_runtime.compile_cache", "llmc_runtime.device.cuda",
    "llmc_runtime.device.gpu", "llmc_runtime.device.hip", "llmc_runtime.engine.messages", "llmc_runtime.engine_args",
    "llmc_runtime.exec.canary", "llmc_runtime.exec.group_executor", "llmc_runtime.exec.rank",
    "llmc_runtime.exec.rank_group", "llmc_runtime.format.nccl_call", "llmc_runtime.grammar",
    "llmc_runtime.ignored_options", "llmc_runtime.pooled_outputs", "llmc_runtime.python_command",
    "llmc_runtime.sched.draft_costs", "llmc_runtime.sched.draft_planner", "llmc_runtime.sched.host_drafts",
    "llmc_runtime.sched.speculation", "llmc_runtime.sched.speculation_config", "llmc_runtime.sched.suffix_draft",
    "llmc_runtime.server", "llmc_runtime.trace",
)  # fmt: skip
# What is imported while a GPU is initialized.
MEANWHILE = ("numpy", "llmc_runtime.engine.loader", "llmc_runtime.exec.executor", "llmc_runtime.sched.scheduler")

BEGIN = "import sys\nfrom llmc_runtime import LLM, SamplingParams\n"
OPEN = "llm = LLM(sys.argv[1], say=lambda line: None)\n"
RUN = OPEN + "llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)\n"
SHOW = "print(*sys.modules)\n"
# The calls that begin to initialize a GPU, as one of an artifact for a CPU does nothing.
SPY = f"""from llmc_runtime.engine import open_model
def prepare_device(manifest, number):
    {SHOW}
open_model.prepare_device = prepare_device
"""


def imported(code: str, *args: str) -> set[str]:
    """Return the names that a new process prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    command = [sys.executable, "-c", code, *args]
    return set(subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.split())


def among(names: set[str], unwanted: tuple[str, ...]) -> list[str]:
    """Return the names that are unwanted, or belong to an unwanted package."""
    return sorted(name for name in names if name.startswith(tuple(f"{u}." for u in unwanted)) or name in unwanted)


def test_a_greedy_request_imports_nothing_that_only_others_need(toy: Path) -> None:
    names = imported(BEGIN + RUN + SHOW, str(toy))
    assert {*MEANWHILE, "llmc_runtime.device.cpu_device"} <= names
    assert among(names, OF_OTHERS) == []


def test_numpy_and_the_engine_are_imported_while_a_gpu_is_initialized(toy: Path) -> None:
    names = imported(BEGIN + SPY + OPEN, str(toy))
    assert "llmc_runtime.api.llm" in names and among(names, MEANWHILE) == []


def test_an_engine_process_imports_no_event_loop() -> None:
    names = imported("import sys\nimport llmc_runtime.engine.engine_process, llmc_runtime.engine.loader\n" + SHOW)
    assert "llmc_runtime.engine.control_rpc" in names
    assert among(names, ("asyncio", "ssl", "llmc_runtime.engine.client", "llmc_runtime.server")) == []


def test_a_module_of_a_package_counts_as_the_package() -> None:
    assert among({"a.b", "a", "ab", "b.a"}, ("a", "c")) == ["a", "a.b"]
