"""Check everything that has never run on an AMD GPU, on a machine with one, and measure it.

    python -m bench.amd --out DIR [--target hip:gfx942] [--quick] [--tune SECONDS]

It needs the extras compile, nvidia (Triton), rocm and dev. DIR gets report.json, with the figures of each step, and
report.md, a table; both are written after every step. Every step runs in a separate process, because a fault of a GPU
may end its process. Steps that fail are reported and the others continue; the exit status is 1 if one failed. The
report has no names of users, hosts or paths. Please attach it to an issue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import shapes

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo-model"
PROMPTS = ("When the morning came,", "Once upon a time", "The river", "A")
# Name -> options of a compile, and the tolerance of a log-probability, by its size. In bfloat16 the CPU target itself
# differs from float32 by 0.09 here. Without an option, the reference is the CPU target in float32.
DTYPES: Mapping[str, tuple[tuple[str, ...], float]] = MappingProxyType(
    {
        "float32": (("--dtype", "float32"), 1e-3),
        "bfloat16": (("--dtype", "bfloat16"), 0.2),
        "fp8": (("--dtype", "bfloat16", "--quant", "fp8", "--kv-cache-dtype", "fp8"), 0.5),
    }
)
LAST = 64 << 10  # bytes of the smallest pieces of memory that are taken
WITH_FP8 = ("hip:gfx942", "hip:gfx950")  # targets with instructions for 8-bit floats
TINY = shapes.Shape(
    "tiny", "llama", 64, 64, 1, 2, 1, 32, 128, 4096, True, MappingProxyType({"rope_theta": 1e4}), eps=1e-5
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The models and sizes that are compared and measured.

    model: for comparisons; None is a random checkpoint of the first of `models`. prompts: texts, or token ids. tokens:
    that each generates. sample: one in `sample` cases of the kernels runs. models: shapes with
    random weights that are timed. batches, lengths: of latency, with the tokens of a prompt and of an output. rounds:
    further options of `llmc bench`. requests: of offline throughput, with these lengths. limits: options of compiles.
    """

    model: Path | None = DEMO
    prompts: tuple[Any, ...] = PROMPTS
    tokens: int = 48
    sample: int = 1
    models: tuple[shapes.Shape, ...] = (shapes.QWEN3_06B, shapes.LLAMA31_8B)
    batches: tuple[int, ...] = (1, 32, 256)
    lengths: tuple[int, int] = (128, 128)
    rounds: tuple[str, ...] = ()
    requests: tuple[int, int, int] = (512, 512, 256)
    limits: tuple[str, ...] = ()
    kernels: str = ""


QUICK = Plan(
    None, ((5, 6, 7), (8,), (9, 10, 11, 12, 13)), 3, 120, (TINY,), (1, 2), (3, 2),
    ("--num-iters", "1", "--num-iters-warmup", "0"), (2, 5, 2),
    ("--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "12"), "triton/rope_append",
)  # fmt: skip


@dataclass
class Step:
    """The outcome of one step: `error` is empty if it succeeded; `figures` are its results."""

    name: str
    seconds: float = 0.0
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The steps. out: the folder of artifacts. tune: seconds in which schedules are measured."""

    out: Path
    target: str
    plan: Plan
    tune: float

    def steps(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return all steps in order."""
        plan = self.plan
        steps: dict[str, Callable[[], dict[str, Any]]] = {"environment": environment, "kernels": self.kernels}
        has_fp8 = self.target in WITH_FP8
        dtypes = [dtype for dtype in DTYPES if dtype != "fp8" or has_fp8]
        steps |= {f"parity in {dtype}": partial(self.parity, dtype) for dtype in dtypes}
        steps |= {
            "graphs": self.graphs, "canary": self.canary, "another architecture": self.another_architecture,
            "too little memory": self.too_little_memory,
        }  # fmt: skip
        quantised = [shapes.Shape.quantised(plan.models[-1], "fp8", "fp8")] if has_fp8 else []
        steps |= {f"speed of {s.name}": partial(self.speed, s) for s in (*plan.models, *quantised)}
        return steps | ({"schedules": self.schedules} if self.tune else {})

    @cached_property
    def model(self) -> Path:
        """The model that is compared."""
        return self.plan.model or shapes.checkpoint(self.plan.models[0], self.out)

    def compiled(self, model: Path, name: str, *options: object) -> Path:
        """Compile a model, unless that has been done, and return the artifact."""
        path = self.out / f"{name}.llmc"
        if not (path / "manifest.json").is_file():
            command("compile", model, "-o", path, *options, *self.plan.limits)
        return path

    def kernels(self) -> dict[str, Any]:
        """Run the code objects of every kernel compared with the references of their ops."""
        arguments = ("--target", self.target, "--sample", self.plan.sample)
        results = last_json(program("tests/gpu/hip_kernels.py", *arguments, codes=(0, 1)))
        if results["failed"]:
            raise RuntimeError(f"{len(results['failed'])} of {results['cases']} cases fail: {results['failed'][:20]}")
        return results

    def parity(self, dtype: str) -> dict[str, Any]:
        """Compare the demonstration model on the GPU with the portable CPU target in float32, as far as tokens agree.

        Tokens may differ from where two are almost equally likely, so the log-probabilities of the common beginning
        decide.
        """
        options, tolerance = DTYPES[dtype]
        model, demo = self.model, ("--target", "cpu:portable", "--dtype", "float32")
        quantised = options[2:4] if "--quant" in options else ()
        reference = self.compiled(model, "cpu-fp8" if quantised else "cpu", *demo, *quantised)
        artifact = self.compiled(model, dtype, "--target", self.target, *options)
        worst, equal, total = 0.0, 0, 0
        for want, got in zip(*(scores(path, self.plan) for path in (reference, artifact)), strict=True):
            same = next((i for i, (a, b) in enumerate(zip(want, got)) if a[0] != b[0]), len(want))
            worst = max([worst, *(abs(a[1] - b[1]) / max(1.0, abs(a[1])) for a, b in zip(want[:same], got[:same]))])
            equal, total = equal + same, total + len(want)
        comparison = {"equal_tokens": equal, "tokens": total, "worst_logprob_difference": worst}
        if worst > tolerance or equal < total // 4:
            raise RuntimeError(f"the GPU computes something else: {comparison}")
        return comparison

    def graphs(self) -> dict[str, Any]:
        """Compare replayed graphs with single launches, each of which is waited for: they have the same bits."""
        from llmc_runtime.exec import canary
        from llmc_runtime.exec.load_executor import load_executor

        path = self.compiled(self.model, "bfloat16", "--target", self.target, *DTYPES["bfloat16"][0])
        recordings = []
        for careful in (False, True):
            executor = load_executor(path, careful=careful)
            recordings.append(canary.record(executor))
            executor.close()
        if recordings[0].runs != recordings[1].runs:
            raise RuntimeError("graphs compute something else than the launches that they consist of")
        return {"prompts": len(recordings[0].runs), "tokens": sum(len(run.tokens) for run in recordings[0].runs)}

    def canary(self) -> dict[str, Any]:
        """Record and check a canary, and check all hashes."""
        artifact = self.out / "bfloat16.llmc"
        command("verify", artifact, "--record")
        return dict(json.loads(command("verify", artifact, "--canary", "--json")))

    def another_architecture(self) -> dict[str, Any]:
        """An artifact for another architecture is refused with E117."""
        other = "hip:gfx90a" if self.target == "hip:gfx942" else "hip:gfx942"
        artifact = self.compiled(self.model, "other", "--target", other, "--weights", "random:1")
        return refused("E117", "verify", artifact, "--record")

    def too_little_memory(self) -> dict[str, Any]:
        """While this process holds nearly all memory of the GPU, an artifact is refused with E205, or with E203 if the
        driver itself keeps what seems free.
        """
        from llmc_runtime.exec.load_executor import load_executor
        from llmc_runtime.format.errors import LlmcError

        with nearly_all_memory() as reserved:
            try:
                load_executor(self.out / "bfloat16.llmc").close()
            except LlmcError as error:
                if error.code not in ("E203", "E205"):
                    raise
                return {"held_bytes": reserved, "message": f"{error}".partition("\n")[0]}
        raise RuntimeError(f"a model runs although {reserved} bytes are taken")

    def speed(self, shape: shapes.Shape) -> dict[str, Any]:
        """Latency of steps and of prompts, and offline throughput, of a model with random weights."""
        options: tuple[object, ...] = ("--target", self.target, "--dtype", "bfloat16", "--weights", "random:1")
        options += ("--max-model-len", 4096, "--kv-cache-dtype", shape.kv_cache)
        options += ("--quant", shape.quant) if shape.quant else ()
        artifact = self.compiled(shapes.folder(shape, self.out), shape.name, *options)
        results: dict[str, Any] = {}
        for rows in self.plan.batches:
            lengths = ("--input-len", self.plan.lengths[0], "--output-len", self.plan.lengths[1], "--batch-size", rows)
            results[f"batch {rows}"] = last_json(
                command("bench", "latency", artifact, *lengths, *self.plan.rounds, "--json")
            )
        count, length, new = self.plan.requests
        lengths = ("--num-prompts", count, "--input-len", length, "--output-len", new)
        results["offline"] = last_json(command("bench", "offline", artifact, *lengths, "--disable-tqdm", "--json"))
        return results

    def schedules(self) -> dict[str, Any]:
        """Measure the schedules of the kernels of the demonstration model."""
        options = ("--target", self.target, "--limit", self.tune, "-o", self.out / "tuning.jsonl", *self.plan.limits)
        some = ("--kernels", self.plan.kernels) if self.plan.kernels else ()
        return {"output": command("tune", self.model, *options, *some)[-2000:]}


def environment() -> dict[str, Any]:
    """Versions and the GPU: its name, its architecture with features, and the version of ROCm."""
    from llmc_runtime.device.hip.driver import Hip

    hip = Hip()
    hip.set_device(0)
    gpu = hip.properties(0)
    device = {
        **asdict(gpu), "rocm": hip.check_driver(gpu.arch.partition(":")[0]), "free_memory": hip.free_memory(),
        "count": hip.device_count(),
    }  # fmt: skip
    return {"device": device, **json.loads(command("collect-env", "--json"))}


@contextmanager
def nearly_all_memory() -> Iterator[int]:
    """Hold the memory of the GPU down to pieces of `LAST` bytes; yield how many bytes are held."""
    from llmc_runtime.device.hip.driver import Hip

    hip = Hip()
    hip.set_device(0)
    blocks: list[int] = []
    total, size = 0, hip.free_memory()
    try:
        while size >= LAST:
            status, address = hip.allocate(size)
            if status:
                size //= 2
            else:
                blocks.append(address)
                total += size
        yield total
    finally:
        for address in blocks:
            hip.release(address)


def scores(artifact: Path, plan: Plan) -> list[list[tuple[int, float]]]:
    """Return the greedy tokens of each prompt with their log-probabilities."""
    from llmc_runtime import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=plan.tokens, ignore_eos=True, logprobs=1)
    with LLM(artifact, say=lambda text: None) as llm:
        prompts = [p if isinstance(p, str) else {"prompt_token_ids": list(p)} for p in plan.prompts]
        outs = llm.generate(prompts, params, use_tqdm=False)
    done = [out.outputs[0] for out in outs]
    return [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or ())] for o in done]


def command(*args: object, code: int = 0) -> str:
    """Run a command of llmc, and return its output, or its errors if `code` is not 0.

    Raises RuntimeError if it exits with another code.
    """
    return program("-m", "llmc.cli", *args, codes=(code,))


def program(*args: object, codes: Sequence[int] = (0,)) -> str:
    """Run Python with these arguments, and return the output, or the errors of a code that is not 0 if that is the only
    one. Raises RuntimeError for another code.
    """
    texts = [str(a) for a in args]
    done = subprocess.run([sys.executable, *texts], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(texts[:3])} ends with {done.returncode}: {done.stderr.strip()[-900:]}")
    return done.stderr if codes[0] else done.stdout


def refused(error: str, *args: object) -> dict[str, Any]:
    """Run a command of llmc that must end with an error of the environment."""
    message = command(*args, code=3)
    if error not in message:
        raise RuntimeError(f"another error than {error}: {message}")
    return {"message": next(line for line in message.splitlines() if error in line)}


def last_json(text: str) -> dict[str, Any]:
    """Return the JSON object with which a text ends."""
    start = text.rindex("\n{", 0, len(text.rstrip())) + 1 if "\n{" in text else text.index("{")
    return dict(json.loads(text[start:]))


def run(name: str, work: Callable[[], dict[str, Any]]) -> Step:
    """Run a step."""
    step, begin = Step(name), time.perf_counter()
    try:
        step.figures = work()
    except Exception as error:  # reported; the next step runs all the same
        step.error = f"{type(error).__name__}: {error}"
    step.seconds = round(time.perf_counter() - begin, 1)
    return step


def apart(name: str, argv: Sequence[str]) -> Step:
    """Run a step in a separate process."""
    begin = time.perf_counter()
    words = [sys.executable, "-m", "bench.amd", *argv, "--only", name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        return Step(**last_json(done.stdout))
    except ValueError:
        error = f"the process ended with {done.returncode}: {done.stderr.strip()[-900:]}"
        return Step(name, round(time.perf_counter() - begin, 1), error)


def table(done: Sequence[Step]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| step | s | outcome | figures |", "|---|---|---|---|"]
    for s in done:
        result = json.dumps(s.figures)[:400].replace("|", "/")
        error = " ".join(s.error.replace("|", "/").split())
        lines.append(f"| {s.name} | {s.seconds} | {error or 'ok'} | {result} |")
    return "\n".join(lines) + "\n"


def write(done: Sequence[Step], out: Path) -> None:
    """Write the report, without the names of folders, which may contain a user's name."""
    for name, text in (("report.json", json.dumps([asdict(s) for s in done], indent=1)), ("report.md", table(done))):
        for path, short in ((out, "OUT"), (ROOT, "LLMC"), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
            text = text.replace(str(path), short)
        (out / name).write_text(text.rstrip() + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the steps and write the report."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.amd", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of artifacts and the report")
    parser.add_argument("--target", default="hip:gfx942", help="target of the GPU (hip:gfx942)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few cases, to try the program first")
    parser.add_argument("--tune", type=float, default=300.0, metavar="SECONDS", help="measure schedules (300; 0: none)")
    parser.add_argument("--only", default="", metavar="STEP", help="run one step, and print what it found (all)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    steps = Bench(out, args.target, QUICK if args.quick else Plan(), args.tune).steps()
    if args.only:
        print(json.dumps(asdict(run(args.only, steps[args.only]))))
        return 0
    done: list[Step] = []
    for name in steps:
        done.append(apart(name, argv))
        print(f"{name}: {done[-1].error or 'ok'} ({done[-1].seconds} s)", flush=True)
        write(done, out)
    return int(any(s.error for s in done))


if __name__ == "__main__":
    sys.exit(main())
