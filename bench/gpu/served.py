"""Compare a model served over HTTP with LLM.generate on the same work, and measure prompts while streams run.

    python -m bench.gpu.served [--model NAME] [--artifacts DIR] [--out DIR] [--requests N] [--concurrency N]
                               [--seconds S] [--batched N | --target-itl-ms MS] [--parts generate,mix,rate,throughput]
                               [--compile-only]

Server, engine and clients are processes of this machine. One server takes all loads, one after the other; DIR gets a
trace of the steps of each load's first minute. The weights are random; the vocabulary consists of random words, so that
every token has a text. Targets: 95 % of LLM.generate's output tokens a second; with the server's default options, TTFT
at most 300 ms and ITL at most 22 ms (99th percentiles) if 8 prompts of 2,000 tokens per second, with 16 output tokens
each, arrive while 64 streams run (`mix`); TTFT of 45 and 110 ms (50th and 99th percentile) and TPOT of 7.0 ms for 16
requests of 1,024 tokens per second, with 128 output tokens each (`rate`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import shapes
from bench.gpu.make import with_weights
from bench.gpu.plan import MODELS, Plan, parser, plan_of
from bench.shapes import Shape

BENCH = (sys.executable, "-m", "llmc_runtime.bench")
SERVE = (sys.executable, "-c", "from llmc_runtime.cli import main_serve; raise SystemExit(main_serve())")
START_SECONDS = 300
PERCENTILES = ("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99")
TRACED_SECONDS = 60.0
ADMIN_KEY = secrets.token_urlsafe()
PARTS = "generate,mix,rate,throughput"


def words(shape: Shape, path: Path) -> None:
    """Return a byte-level tokenizer.json of the shape's vocabulary size: all bytes, then random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(shape.vocab)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < shape.vocab:
        letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))
        vocab.setdefault(rng.choice(("", "\u0120")) + letters, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def artifact(plan: Plan, shape: Shape) -> Path:
    """Return the artifact of the shape with a tokenizer and random weights, compiling it if it is missing."""
    path = plan.artifacts / "served" / f"{shape.name}.llmc"
    if not (path / "manifest.json").is_file():
        model = path.with_suffix(".hf")
        shutil.copytree(shapes.folder(shape, plan.artifacts), model, dirs_exist_ok=True)
        words(shape, model / "tokenizer.json")
        with_weights(plan, model, path, "random:1", shape)
    return path


@contextmanager
def server(path: Path, log: Path, *options: str) -> Iterator[int]:
    """Start a server and yield its port when it is ready; it must exit with 0 after SIGTERM."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with log.open("w") as err:
        process = subprocess.Popen([*SERVE, str(path), "--port", str(port), *options], stderr=err)
        try:
            begin = time.monotonic()
            while not ready(port):
                if process.poll() is not None or time.monotonic() - begin > START_SECONDS:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            code = process.wait(60)
    if code:
        raise SystemExit(f"the server ended with {code}:\n{log.read_text()[-3000:]}")


def ready(port: int) -> bool:
    """Return whether the server accepts requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def measured(*arguments: str) -> dict[str, Any]:
    """Run `llmc bench` and return its JSON report."""
    done = subprocess.run([*BENCH, *arguments, "--json", "--disable-tqdm"], stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode:
        raise SystemExit(f"llmc bench {' '.join(arguments)} ended with {done.returncode}: {json.dumps(report)[:3000]}")
    return report


@contextmanager
def traced(port: int, file: Path, seconds: float) -> Iterator[None]:
    """Record the server's steps for up to `seconds`, and write them when the body has ended."""

    def record() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", f"/admin/trace?seconds={seconds:g}", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"no trace was recorded: {text[:300]!r}")
        file.write_bytes(text)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(record)
        yield
        done.result()


def generate(path: Path, args: argparse.Namespace, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the report of LLM.generate on the requests of `throughput`, the better of two rounds."""
    read, write = map(str, sizes)
    return measured("offline", str(path), "--num-prompts", str(args.requests), "--input-len", read, "--output-len",
                    write, "--max-num-seqs", str(args.concurrency), "--rounds", "2", "--warmups", "0")  # fmt: skip


def throughput(port: int, args: argparse.Namespace, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the report of the server on many concurrent requests, the better of two rounds."""
    read, write = map(str, sizes)
    rounds = [
        served(port, "--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency),
               "--random-input-len", read, "--random-output-len", write, "--seed", str(seed),
               "--client-processes", "4")
        for seed in range(2)
    ]  # fmt: skip
    return max(rounds, key=lambda figures: figures["output_throughput"])


def mix(port: int, args: argparse.Namespace, sizes: tuple[int, int]) -> dict[str, Any]:
    """Measure prompts that arrive while streams are running."""
    seconds, (read, write) = args.seconds, sizes
    kinds = (
        f"name=streams,concurrency=64,input={min(128, read)},output={write},duration={seconds}",
        f"name=prompts,rate=8,input={read},output=16,duration={seconds}",
    )
    return served(port, "--num-warmups", "1", *PERCENTILES, *(x for kind in kinds for x in ("--mix", kind)))


def rate(port: int, args: argparse.Namespace, sizes: tuple[int, int]) -> dict[str, Any]:
    """Measure requests that arrive at random."""
    read, write = sizes
    kind = f"name=requests,rate=16,input={read},output={write},duration={args.seconds}"
    return served(port, "--num-warmups", "1", *PERCENTILES, "--mix", kind)


def served(port: int, *arguments: str) -> dict[str, Any]:
    """Return the report of a load on the server."""
    report = measured("serve", "--port", str(port), "--ignore-eos", "--client-processes", "2", *arguments)
    print(json.dumps(report, indent=1)[:6000], flush=True)
    return report


def main(argv: Sequence[str] | None = None) -> None:
    ap = parser()
    ap.prog = "python -m bench.gpu.served"
    ap.add_argument("--model", default="llama-3.1-8b", help=f"one of {', '.join(MODELS)}")
    ap.add_argument("--requests", type=int, default=1024, metavar="N", help="requests of the throughput part")
    ap.add_argument(
        "--concurrency", type=int, default=256, metavar="N", help="concurrent requests of the throughput part"
    )
    ap.add_argument("--seconds", type=int, default=120, metavar="S", help="seconds of mix and rate; default 120")
    ap.add_argument("--batched", type=int, metavar="N", help="maximum tokens of a step")
    ap.add_argument("--target-itl-ms", type=float, metavar="MS", help="target of a step with prompts")
    ap.add_argument("--parts", default=PARTS, help=f"parts to run, of {PARTS}")
    args = ap.parse_args(argv)
    args.models = args.model
    plan, shape = replace(plan_of(args), models=()), MODELS[args.model]
    args.out.mkdir(parents=True, exist_ok=True)
    path = artifact(plan, shape)
    if not args.compile_only:
        run(path, args, min(shape.positions, 4096) // 2)


def run(path: Path, args: argparse.Namespace, room: int) -> None:
    """Run the parts and write their reports. room: maximum number of tokens of a prompt and its output, each."""
    half, whole = (min(256, room // 2),) * 2, (min(2000, room - 32),) * 2
    loads = {
        "mix": partial(mix, sizes=whole),
        "rate": partial(rate, sizes=(min(1024, room), min(128, room))),
        "throughput": partial(throughput, sizes=half),
    }
    parts, report = args.parts.split(","), {}

    def keep(name: str, result: dict[str, Any]) -> None:
        report[name] = result
        (args.out / "served.json").write_text(json.dumps(report, indent=1) + "\n")

    if "generate" in parts:
        keep("generate", generate(path, args, half))
    limits = ("--max-num-batched-tokens", args.batched), ("--target-itl-ms", args.target_itl_ms)
    options = [str(option) for pair in limits if pair[1] is not None for option in pair]
    if chosen := [name for name in loads if name in parts]:
        keys = args.out / "admin-keys.txt"
        keys.write_text(f"{ADMIN_KEY}\n")
        with server(path, args.out / "server.log", "--admin-key-file", str(keys), *options) as port:
            for name in chosen:
                with traced(port, args.out / f"{name}-trace.json", min(args.seconds, TRACED_SECONDS)):
                    keep(name, loads[name](port, args))
    if {"generate", "throughput"} <= report.keys():
        ours, alone = report["throughput"]["output_throughput"], report["generate"]["output_tokens_per_second"]
        print(f"served {ours:.0f} tok/s, LLM.generate {alone:.0f}: {ours / alone:.1%} (target 95 %)", flush=True)


if __name__ == "__main__":
    main()
