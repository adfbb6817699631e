"""Compare embeddings and scores of pairs with sentence-transformers, from texts to numbers, with random weights.

    python -m bench.embeddings [--models A,B] [--device cpu|cuda] [--loads A,B] [--rounds N] [--scale N]
        [--threads N] [--artifacts DIR] [--compile-only] [--served] [--json FILE] [--peer PYTHON] [--peer-kind KIND]

Contenders take turns, each in a process of its own, and medians are compared; `--served` adds llmc-serve's
/v1/embeddings. Peers run in their best of the settings tried (dtype, batch size) with PYTHON, this one by default, and
sort texts by length. `--peer-kind`: without sentence-transformers, the same work is done with transformers alone; vllm
makes batches of its own. Results agree or the
bench fails. On the CPU, `cpu` is the processor time per text: it counts where other processes share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.embedding_models import LOADS, MODELS, Load, Model, Texts, checkpoint, texts, tokenizer

ROOT = Path(__file__).resolve().parent.parent
AGREE = 0.98  # the least cosine of a contender's embedding and the first contender's
CHECKED = 8  # texts whose results are compared


def artifact(model: Model, folder: Path, device: str) -> Path:
    """The compiled model; for a GPU without weights, which `packed` adds on the machine that measures."""
    target = "cuda:sm_90" if device == "cuda" else "cpu:native"
    out = folder / f"{model.name}-{target.replace(':', '-')}.llmc"
    if not (out / "manifest.json").exists():
        source = checkpoint(model, folder, "bfloat16")
        more = ["--no-weights"] if device == "cuda" else []
        command = [sys.executable, "-m", "llmc.cli", "compile", source, "-o", out, "--target", target]
        subprocess.run([*command, "--max-model-len", str(model.length), *more], check=True, cwd=ROOT)
    return out


def packed(model: Model, folder: Path, device: str) -> Path:
    """The same with the weights of the checkpoint."""
    out = artifact(model, folder, device)
    if device == "cuda" and not (done := out.with_suffix(".packed")).exists():
        source = checkpoint(model, folder, "bfloat16")
        subprocess.run([sys.executable, "-m", "llmc.cli", "pack", out, source], check=True, cwd=ROOT)
        done.touch()
    return out


Run = Callable[[Texts], Sequence[Any]]


def ours(path: str, task: str, threads: int) -> tuple[Run, str]:
    """LLM.embed or LLM.score over an artifact."""
    from llmc_runtime import LLM, __version__

    on_cpu = "cpu-" in Path(path).name
    # On a GPU, peers need memory, too.
    options: dict[str, Any] = {"threads": threads} if on_cpu else {"kv_cache_memory_bytes": 8 << 30}
    llm = LLM(path, enable_prefix_caching=False, say=lambda line: None, **options)

    def score(pairs: Any) -> Sequence[Any]:
        first, second = zip(*pairs)
        return [[o.outputs.score] for o in llm.score(list(first), list(second), use_tqdm=False)]

    def embed(prompts: Any) -> Sequence[Any]:
        return [o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)]

    return score if task == "score" else embed, f"llmc_runtime {__version__}"


def sentence_transformers(path: str, task: str, batch: int, device: str) -> tuple[Run, str]:
    """SentenceTransformer.encode or CrossEncoder.predict, with the checkpoint's dtype."""
    import sentence_transformers as st
    import torch

    dtype = torch.bfloat16 if path.endswith("bfloat16") else torch.float32
    version = f"sentence-transformers {st.__version__}"
    if task == "score":
        cross = st.CrossEncoder(path, device=device, model_kwargs={"dtype": dtype})
        return lambda pairs: cross.predict(pairs, batch_size=batch, show_progress_bar=False).reshape(-1, 1), version
    net = st.SentenceTransformer(path, device=device, model_kwargs={"dtype": dtype})
    return lambda prompts: net.encode(prompts, batch_size=batch, show_progress_bar=False), version


def transformers(path: str, task: str, batch: int, device: str) -> tuple[Run, str]:
    """The same with only transformers: batches of texts in order of length, pooled here."""
    import numpy as np
    import torch
    import transformers as hf

    dtype = torch.bfloat16 if path.endswith("bfloat16") else torch.float32
    owner = hf.AutoModelForSequenceClassification if task == "score" else hf.AutoModel
    net = owner.from_pretrained(path, dtype=dtype).to(device).eval()
    words = hf.AutoTokenizer.from_pretrained(path)
    modes = json.loads((Path(path) / "1_Pooling" / "config.json").read_text()) if task == "embed" else {}

    def run(prompts: Any) -> Sequence[Any]:
        order = sorted(range(len(prompts)), key=lambda i: -len("".join(prompts[i])))
        outputs: list[Any] = [None] * len(prompts)
        for start in range(0, len(prompts), batch):
            chosen = order[start : start + batch]
            part = [prompts[i] for i in chosen]
            pairs = [list(side) for side in zip(*part)] if task == "score" else [part]
            inputs = words(*pairs, padding=True, truncation=True, return_tensors="pt").to(device)
            with torch.inference_mode():
                out = net(**inputs)
                rows = (
                    torch.sigmoid(out.logits.float())
                    if task == "score"
                    else pooled(out.last_hidden_state, inputs["attention_mask"], modes)
                )
            for i, row in zip(chosen, rows.cpu().numpy()):
                outputs[i] = row
        return np.array(outputs)

    return run, f"transformers {hf.__version__}"


def pooled(hidden: Any, mask: Any, modes: Mapping[str, bool]) -> Any:
    """Pool the hidden states [b, t, h] as sentence-transformers does by these modes; return normalized rows [b, h]."""
    import torch

    if modes["pooling_mode_cls_token"]:
        rows = hidden[:, 0]
    elif modes["pooling_mode_lasttoken"]:
        rows = hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    else:
        rows = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(rows.float(), dim=1)


def vllm(path: str, task: str, threads: int) -> tuple[Run, str]:
    """vLLM's LLM.embed or LLM.score on CPUs, with the checkpoint's dtype and without prefix caching."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", DO_NOT_TRACK="1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0" if threads == 1 else f"0-{threads - 1}"])
    import vllm as peer

    dtype = "bfloat16" if path.endswith("bfloat16") else "float32"
    llm = peer.LLM(path, runner="pooling", dtype=dtype, enforce_eager=True, enable_prefix_caching=False)

    def run(prompts: Any) -> Sequence[Any]:
        if task == "score":
            first, second = zip(*prompts)
            return [[o.outputs.score] for o in llm.score(list(first), list(second), use_tqdm=False)]
        return [o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)]

    return run, f"vllm {peer.__version__}"


def contend(kind: str, path: str, task: str, batch: int, device: str, threads: int) -> None:
    """Load the model, print the contender's name, then answer texts until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    if kind == "llmc":
        run, version = ours(path, task, threads)
    elif kind == "vllm":
        run, version = vllm(path, task, threads)
    else:
        import torch

        torch.set_num_threads(threads)
        peer = sentence_transformers if kind == "sentence-transformers" else transformers
        run, version = peer(path, task, batch, device)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        calls = [[tuple(t) if isinstance(t, list) else t for t in call] for call in json.loads(line)]
        begin, busy = time.perf_counter(), time.process_time()
        rows, *_ = [run(call) for call in calls]
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - busy}
        shown = [[float(x) for x in row] for row in rows[:CHECKED]]
        print(json.dumps(times | {"rows": shown}), file=answers, flush=True)


class Contender:
    """A process that embeds on request."""

    def __init__(self, name: str, python: str, *words: str) -> None:
        self.name, self.log = name, tempfile.TemporaryFile("w+")
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}:{os.environ.get('PYTHONPATH', '')}"}
        env |= {"HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [python, "-m", "bench.embeddings", "--contender", *words],
            cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self.version = str(self._answer()["version"])

    def measure(self, calls: Sequence[Texts]) -> dict[str, Any]:
        """Embed the texts of each call; return the seconds and the first call's first rows."""
        assert self.process.stdin is not None
        print(json.dumps(calls), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # vLLM's process stays
            self.process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self.log.read()[-1500:]}")
        return dict(json.loads(line))


class Served:
    """llmc-serve with /v1/embeddings or /v1/score, and one client that sends the texts of a call in one request."""

    def __init__(self, path: Path, task: str, threads: int) -> None:
        self.name, self.task, self.version = "llmc-serve", task, "llmc-serve"
        options = ["--threads", str(threads)] if "cpu-" in path.name else []
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}:{os.environ.get('PYTHONPATH', '')}"}
        program = "from llmc_runtime.cli import main_serve; raise SystemExit(main_serve())"
        command = [sys.executable, "-c", program, str(path), "--port", "0", "--no-enable-prefix-caching", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if " at http" in line:
                self.url = line[line.index("http") :].split()[0]
                break
        else:
            raise RuntimeError("llmc-serve ended")

    def measure(self, calls: Sequence[Texts]) -> dict[str, Any]:
        """Send a request for each call; return the seconds and the first rows."""
        begin = time.perf_counter()
        first, *_ = [self._ask(call) for call in calls]
        return {"seconds": time.perf_counter() - begin, "cpu": 0.0, "rows": first[:CHECKED]}

    def _ask(self, call: Texts) -> list[list[float]]:
        if self.task == "score":
            first, second = zip(*call)
            path, body = "/v1/score", {"text_1": first, "text_2": second}
        else:
            path, body = "/v1/embeddings", {"input": call}
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            data = json.loads(reply.read())["data"]
        return [row["embedding"] if "embedding" in row else [row["score"]] for row in data]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def agree(names: Sequence[str], rows: Sequence[Any]) -> None:
    """Raise RuntimeError if a contender's results differ from the first one's by more than rounding does."""
    import numpy as np

    reference = np.array(rows[0])
    for name, row in zip(names[1:], rows[1:]):
        other = np.array(row)
        if reference.shape[1] == 1:
            good = np.allclose(reference, other, atol=0.02)
        else:
            cosines = (reference * other).sum(1) / np.linalg.norm(reference, axis=1) / np.linalg.norm(other, axis=1)
            good = bool((cosines > AGREE).all())
        if not good:
            raise RuntimeError(f"{name} and {names[0]} differ: {other[:2, :4]} and {reference[:2, :4]}")


def bench(model: Model, args: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure all loads of a model, a row for each contender and load."""
    folder = Path(args.artifacts)
    path = packed(model, folder, args.device)
    peers = [("bfloat16", 32)] if args.device == "cpu" else [("bfloat16", 32), ("bfloat16", 128)]
    if args.device == "cpu":
        peers += [("float32", 32), ("float32", 8)]
    if args.peer_kind == "vllm":
        peers = [("bfloat16", 0)]  # on CPUs, float32 takes seven times as long
    contenders: list[Any] = []
    common = (args.device, str(args.threads))
    try:
        contenders.append(Contender("llmc", sys.executable, "llmc", str(path), model.task, "0", *common))
        for dtype, batch in peers:
            words = (args.peer_kind, str(checkpoint(model, folder, dtype)), model.task, str(batch), *common)
            name = f"{args.peer_kind} {dtype}" + (f", batches of {batch}" if batch else "")
            contenders.append(Contender(name, args.peer, *words))
        if args.served:
            contenders.append(Served(path, model.task, args.threads))
        for name in args.loads.split(","):
            load = LOADS[name]
            if load.texts > 1:
                load = replace(load, texts=load.texts * args.scale)
            _load(model, load, contenders, args.rounds, say)
    finally:
        for contender in contenders:
            contender.close()


def _load(model: Model, load: Load, contenders: Sequence[Any], rounds: int, say: Callable[..., None]) -> None:
    encode = tokenizer(model.owner.startswith("Bert")).encode
    warm = [texts(model, load, 1)]
    agree([c.name for c in contenders], [c.measure(warm)["rows"] for c in contenders])
    measured: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders}
    tokens = 0
    for i in range(rounds):
        calls = [texts(model, load, 1000 * i + call) for call in range(load.times)]
        tokens += sum(len(encode(*t if isinstance(t, tuple) else (t,)).ids) for call in calls for t in call)
        for contender in contenders if i % 2 == 0 else contenders[::-1]:
            measured[contender.name].append(contender.measure(calls))
    count = load.texts * load.times
    for contender in contenders:
        seconds = statistics.median(row["seconds"] for row in measured[contender.name])
        busy = statistics.median(row["cpu"] for row in measured[contender.name])
        say({
            "model": model.name, "load": load.name, "contender": contender.name, "version": contender.version,
            "texts_per_s": round(count / seconds, 1), "tokens_per_s": round(tokens / rounds / seconds),
            "ms_per_call": round(1e3 * seconds / load.times, 2), "cpu_ms_per_text": round(1e3 * busy / count, 3),
        })  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--contender"]:
        kind, path, task, batch, device, threads = sys.argv[2:8]
        contend(kind, path, task, int(batch), device, int(threads))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--artifacts", default=str(ROOT / "build" / "bench" / "embeddings"))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--json", default="")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument(
        "--peer-kind", choices=("sentence-transformers", "transformers", "vllm"), default="sentence-transformers"
    )
    args = parser.parse_args()
    Path(args.artifacts).mkdir(parents=True, exist_ok=True)

    def say(row: dict[str, Any]) -> None:
        print("  ".join(f"{v}" for k, v in row.items() if k != "version"), flush=True)
        if args.json:
            with Path(args.json).open("a") as file:
                print(json.dumps(row), file=file)

    for name in args.models.split(","):
        if args.compile_only:
            artifact(MODELS[name], Path(args.artifacts), args.device)
        else:
            bench(MODELS[name], args, say)


if __name__ == "__main__":
    main()
