"""Check everything that has never run on an AMD GPU, on a machine with one, and measure it.

    python -m bench.amd --out DIR [--target hip:gfx942] [--tune SECONDS]

It needs the extras compile, nvidia (Triton) and rocm. DIR gets report.json, with what each step found, and report.md, a
table. Steps that fail are reported and the others continue; the exit status is 1 if one failed. The report has no names
of users, hosts or paths. Please attach it to an issue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import shapes

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo-model"
PROMPTS = ("When the morning came,", "Once upon a time", "The river", "A")
TOKENS = 48
# Of a log-probability, by its size. In bfloat16 the CPU target itself differs from float32 by 0.09 here.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
BATCHES = (1, 32, 256)


@dataclass
class Step:
    """The outcome of one step: `error` is empty if it succeeded; `found` are its figures."""

    name: str
    seconds: float = 0.0
    error: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def run(name: str, work: Callable[[], dict[str, Any]]) -> Step:
    """Run a step, and print a line about it."""
    step, begin = Step(name), time.perf_counter()
    try:
        step.found = work()
    except Exception as error:  # reported; the next step runs all the same
        step.error = f"{type(error).__name__}: {error}"
    step.seconds = round(time.perf_counter() - begin, 1)
    print(f"{name}: {step.error or 'ok'} ({step.seconds} s)", flush=True)
    return step


def command(*args: object, code: int = 0) -> str:
    """Run a command of llmc, and return its output. Raises RuntimeError if it exits with another code."""
    done = subprocess.run(
        [sys.executable, "-m", "llmc.cli", *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        raise RuntimeError(f"llmc {args[0]} exits with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout if code == 0 else done.stderr


def compiled(model: Path, out: Path, *options: object) -> Path:
    """Compile a model, unless that has been done, and return the artifact."""
    if not (out / "manifest.json").is_file():
        command("compile", model, "-o", out, *options)
    return out


def scores(artifact: Path, prompts: Sequence[str]) -> list[list[tuple[int, float]]]:
    """Return the greedy tokens of each prompt with their log-probabilities."""
    from llmc_runtime import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    with LLM(artifact, say=lambda text: None) as llm:
        outs = llm.generate(list(prompts), params, use_tqdm=False)
    done = [out.outputs[0] for out in outs]
    return [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or ())] for o in done]


def parity(out: Path, target: str, dtype: str) -> dict[str, Any]:
    """Compare the demonstration model on the GPU with the portable CPU target in float32, as far as the tokens agree.

    Tokens may differ from where two are almost equally likely, so the log-probabilities of the common beginning decide.
    """
    reference = compiled(DEMO, out / "cpu.llmc", "--target", "cpu:portable", "--dtype", "float32")
    artifact = compiled(DEMO, out / f"{dtype}.llmc", "--target", target, "--dtype", dtype)
    worst, equal, total = 0.0, 0, 0
    for want, got in zip(scores(reference, PROMPTS), scores(artifact, PROMPTS), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(want, got)) if a[0] != b[0]), len(want))
        worst = max([worst, *(abs(a[1] - b[1]) / max(1.0, abs(a[1])) for a, b in zip(want[:same], got[:same]))])
        equal, total = equal + same, total + len(want)
    found = {"equal_tokens": equal, "tokens": total, "worst_logprob_difference": worst}
    if worst > TOLERANCE[dtype] or equal < total // 4:
        raise RuntimeError(f"the GPU computes something else: {found}")
    return found


def canary(out: Path) -> dict[str, Any]:
    """Record and check a canary, and check all hashes."""
    artifact = out / "bfloat16.llmc"
    command("verify", artifact, "--record")
    return dict(json.loads(command("verify", artifact, "--canary", "--json")))


def wrong_architecture(out: Path, target: str) -> dict[str, Any]:
    """An artifact for another architecture is refused with E117."""
    other = "hip:gfx90a" if target == "hip:gfx942" else "hip:gfx942"
    artifact = compiled(DEMO, out / "other.llmc", "--target", other, "--weights", "random:1")
    message = command("verify", artifact, "--record", code=3)
    if "E117" not in message:
        raise RuntimeError(f"another error than E117: {message}")
    return {"message": message.splitlines()[0]}


def speed(out: Path, target: str, shape: shapes.Shape) -> dict[str, Any]:
    """Latency of steps and of prompts of a model of real size with random weights."""
    folder = shapes.folder(shape, out)
    options = ("--target", target, "--dtype", "bfloat16", "--weights", "random:1", "--max-model-len", 4096)
    artifact = compiled(folder, out / f"{shape.name}.llmc", *options)
    found: dict[str, Any] = {}
    for rows in BATCHES:
        lengths = ("--input-len", 128, "--output-len", 128, "--batch-size", rows, "--json")
        found[f"batch {rows}"] = json.loads(command("bench", "latency", artifact, *lengths))
    return found


def steps(out: Path, target: str, tune: float) -> list[Step]:
    """Run all steps in order."""
    done = [run("environment", lambda: dict(json.loads(command("collect-env", "--json"))))]
    done += [run(f"parity in {dtype}", lambda dtype=dtype: parity(out, target, dtype)) for dtype in TOLERANCE]
    done.append(run("canary", lambda: canary(out)))
    done.append(run("another architecture", lambda: wrong_architecture(out, target)))
    for shape in (shapes.QWEN3_06B, shapes.LLAMA31_8B):
        done.append(run(f"speed of {shape.name}", lambda shape=shape: speed(out, target, shape)))
    if tune:
        records = out / "tuning.jsonl"
        options = ("--target", target, "--limit", tune, "-o", records)
        done.append(run("schedules", lambda: {"output": command("tune", DEMO, *options)[-2000:]}))
    return done


def table(done: Sequence[Step]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| step | s | outcome | found |", "|---|---|---|---|"]
    for s in done:
        found = json.dumps(s.found)[:400].replace("|", "/")
        lines.append(f"| {s.name} | {s.seconds} | {s.error.replace('|', '/') or 'ok'} | {found} |")
    return "\n".join(lines) + "\n"


def without_paths(text: str, out: Path) -> str:
    """Return the text with the names of both folders shortened, which may contain that of a user."""
    return text.replace(str(out), "OUT").replace(str(ROOT), "LLMC").replace(sys.prefix, "PYTHON")


def main() -> int:
    """Parse the command line, run the steps and write the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.amd", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of artifacts and the report")
    parser.add_argument("--target", default="hip:gfx942", help="target of the GPU (hip:gfx942)")
    parser.add_argument("--tune", type=float, default=300.0, metavar="SECONDS", help="measure schedules (300; 0: none)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    done = steps(out, args.target, args.tune)
    (out / "report.json").write_text(without_paths(json.dumps([asdict(s) for s in done], indent=1) + "\n", out))
    (out / "report.md").write_text(without_paths(table(done), out))
    return int(any(s.error for s in done))


if __name__ == "__main__":
    sys.exit(main())
