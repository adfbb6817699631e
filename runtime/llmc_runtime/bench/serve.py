"""`llmc bench serve`: puts a load on a running server, from options to report. Client processes send the requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from llmc_runtime import __version__
from llmc_runtime.bench import workers
from llmc_runtime.bench.client_worker import CHAT, COMPLETIONS, Recipe, read_items
from llmc_runtime.bench.figures import METRICS, Wanted, figures
from llmc_runtime.bench.http_client import Pool, Reply, WireError
from llmc_runtime.bench.table import Line, table
from llmc_runtime.bench.workload import Mix, parse_mix
from llmc_runtime.format.errors import LlmcError

_MIX = (
    "one of several concurrent workloads: name=,rate=,burstiness=,concurrency=,num=,duration=,input=,output=,"
    "range_ratio=,prefix=,prefixes= (default of each: the option of that meaning); repeatable"
)
_PROMPTS = 1000  # if neither a number nor a duration is set
_VOCABULARY = 1000  # if neither the options nor the server state its size
_BUSY, _LATE_MS = 0.85, 10.0  # acceptable use of a core and delay (99th percentile) of a client process


def run(args: argparse.Namespace, keys: Sequence[str], out: IO[str], err: IO[str]) -> int:
    """Run the measurement and print the report. Returns the exit status: 1 if a request failed.

    Raises LlmcError E670 or E671.
    """
    _check(args)
    args.endpoint = _endpoint(args)
    mixes, wanted = mixes_of(args), _wanted(args)
    plan = asyncio.run(_plan(args, _base(args), mixes, keys))
    progress = _Progress(err, [mix.name for mix in mixes], not args.disable_tqdm)
    told = asyncio.run(workers.run(plan, args.client_processes, progress.show))
    progress.end()
    report = _report(args, plan, mixes, told, wanted)
    for warning in report["warnings"]:
        print(f"llmc: {warning}", file=err)
    print(json.dumps(report, indent=1) if args.json else _text(report, wanted), file=out)
    if args.save_result or args.result_filename:
        path = args.result_dir / (args.result_filename or time.strftime("llmc-bench-serve-%Y%m%d-%H%M%S.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"llmc: written: {path}", file=err)
    return 1 if report["failed"] else 0


def _check(args: argparse.Namespace) -> None:
    """Raise LlmcError E670 if a number is too small."""
    least = {"num_prompts": 1, "random_vocab_size": 1, "client_processes": 1, "seed": 0, "num_warmups": 0}
    for name, low in least.items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and value < low:
            raise LlmcError("E670", f"{option} {value} is not possible", f"a whole number of {low} or more")
    if not args.request_timeout > 0:
        cause = f"--request-timeout {args.request_timeout:g} is not possible"
        raise LlmcError("E670", cause, "a number of seconds above 0")


def _endpoint(args: argparse.Namespace) -> str:
    """Return the endpoint selected by --endpoint or --backend. Raises LlmcError E670 if they disagree."""
    named = CHAT if args.backend == "openai-chat" else COMPLETIONS
    if args.backend is not None and args.endpoint not in (None, named):
        raise LlmcError("E670", f"--backend {args.backend} is of {named}, not {args.endpoint}", "give one of them")
    return str(args.endpoint or named)


def _base(args: argparse.Namespace) -> SplitResult:
    """Return the server's base URL, without /v1. Raises LlmcError E670."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    given = args.base_url or f"http://{host}:{args.port}"
    try:
        base = urlsplit(given)
        right = base.scheme in ("http", "https") and base.hostname and base.port != 0
    except ValueError:  # invalid port or IPv6 address
        right = False
    if not right:
        raise LlmcError("E670", f"{given!r:.80} is no address of a server", "--base-url http://127.0.0.1:8000")
    return base._replace(path=base.path.rstrip("/").removesuffix("/v1").rstrip("/"))


def mixes_of(args: argparse.Namespace) -> list[Mix]:
    """Return the mixes of --mix, or the one described by the other options. Raises LlmcError E670."""
    count = args.num_prompts or (None if args.duration else _PROMPTS)
    default = Mix(
        "all", args.request_rate, args.burstiness, args.max_concurrency, count, args.duration,
        args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len,
        args.random_num_prefixes,
    )  # fmt: skip
    mixes = [parse_mix(text, default) for text in args.mix] or [default]
    if len({mix.name for mix in mixes}) < len(mixes):
        raise LlmcError("E670", "two mixes have one name", "give each --mix a name=NAME of its own")
    return mixes


def _wanted(args: argparse.Namespace) -> Wanted:
    goals = {}
    for text in args.goodput:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = math.nan
        if name not in METRICS or not goals[name] > 0:
            raise LlmcError("E670", f"--goodput {text!r:.40} is no goal", "METRIC:MILLISECONDS, as in ttft:500 tpot:25")
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    unknown = [name for name in metrics if name not in METRICS]
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",") if p]
    except ValueError:
        percentiles = [math.nan]
    if unknown or not all(0 <= p <= 100 for p in percentiles):
        cause = f"--percentile-metrics or --metric-percentiles: {unknown or args.metric_percentiles!r}"
        raise LlmcError("E670", cause, f"some of {','.join(METRICS)}; numbers from 0 to 100, as in 50,90,99")
    return Wanted(metrics, percentiles, goals or None)


async def _plan(
    args: argparse.Namespace, base: SplitResult, mixes: Sequence[Mix], keys: Sequence[str]
) -> dict[str, Any]:
    """Return the plan for the client processes, with information requested from the server."""
    tls, host = base.scheme == "https", base.hostname or ""
    port = base.port or (443 if tls else 80)
    name = f"[{host}]" if ":" in host else host
    shared = f"Host: {name}:{port}\r\n" + (f"Authorization: Bearer {keys[0]}\r\n" if keys else "")
    model, vocabulary = args.model, args.random_vocab_size
    if model is None or (vocabulary is None and args.dataset_name == "random"):
        card = await _model(host, port, tls, f"GET {base.path}/v1/models HTTP/1.1\r\n{shared}\r\n", model)
        model, vocabulary = card["id"], vocabulary or card.get("vocab_size")
    items = []
    if args.dataset_name != "random":
        if args.dataset_path is None:
            raise LlmcError("E670", f"--dataset-name {args.dataset_name} needs a file", "--dataset-path FILE")
        items = read_items(args.dataset_path, args.dataset_name, args.endpoint)
    recipe = Recipe(
        args.endpoint, model, vocabulary or _VOCABULARY, args.seed, args.ignore_eos, items, _extra(args.extra_body)
    )
    head = f"POST {base.path}{args.endpoint} HTTP/1.1\r\n{shared}Content-Type: application/json\r\n"
    return {
        "host": host, "port": port, "tls": tls, "head": head, "recipe": asdict(recipe), "timeout": args.request_timeout,
        "mixes": [mix.told() for mix in mixes], "num_warmups": args.num_warmups,
    }  # fmt: skip


def _extra(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise LlmcError("E670", f"--extra-body {text!r:.60} is no JSON object", """as in '{"top_p": 0.9}'""")
    return extra


async def _model(host: str, port: int, tls: bool, request: str, wanted: str | None) -> dict[str, Any]:
    """Return the entry of the wanted model in /v1/models, or of the first one. Raises LlmcError E671."""
    import ssl

    body = bytearray()
    pool = Pool(host, port, ssl.create_default_context() if tls else None)
    try:
        connection = await pool.take()
        reply = await asyncio.wait_for(connection.ask(request.encode("latin-1"), _into(body)), 30)
        pool.give(connection, reply)
        if reply.status != 200:
            raise WireError(f"HTTP {reply.status}: {bytes(body[:200]).decode(errors='replace')}")
        cards = json.loads(body)["data"]
        found: dict[str, Any] = next((card for card in cards if card["id"] == wanted), cards[0] if not wanted else {})
    except (OSError, WireError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as e:
        cause = f"{host}:{port} does not say which models it has: {type(e).__name__}: {e}"
        raise LlmcError("E671", cause[:300], "see that it runs; or give --model and --random-vocab-size") from None
    finally:
        pool.close()
    return {"id": wanted, **found}


def _into(body: bytearray) -> Any:
    def hear(reply: Reply, part: bytes) -> None:
        body.extend(part)

    return hear


def _report(
    args: argparse.Namespace, plan: Mapping[str, Any], mixes: Sequence[Mix], told: workers.Told, wanted: Wanted
) -> dict[str, Any]:
    late = float(np.percentile(told.late, 99)) * 1e3 if told.late else 0.0
    total = figures(told.records, told.start, wanted)
    each = {
        mix.name: figures([r for r in told.records if r.mix == i], told.start, wanted) for i, mix in enumerate(mixes)
    }
    one = mixes[0] if len(mixes) == 1 else None
    report = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "backend": args.backend or "openai", "endpoint": args.endpoint,
        "model_id": plan["recipe"]["model"], "version": __version__, "seed": args.seed,
        "num_prompts": len(told.records), "client_processes": args.client_processes,
        "request_rate": one.told()["rate"] if one else None, "burstiness": one.burstiness if one else None,
        "max_concurrency": one.max_concurrency if one else None,
        **total,
        "goals": dict(wanted.goals or {}),
        "client": {"busiest_process": told.busy, "p99_late_ms": late},
    }  # fmt: skip
    if one is None:
        report["mixes"] = {mix.name: {"mix": mix.told(), **each[mix.name]} for mix in mixes}
    if args.save_detailed:
        report |= _detailed(told)
    return report | {"warnings": _warnings(told.busy, late, mixes, each)}


def _detailed(told: workers.Told) -> dict[str, list[Any]]:
    """Return lists with one value per request; times are in seconds, as in vLLM."""
    return {
        "input_lens": [r.prompt_tokens for r in told.records],
        "output_lens": [r.output_tokens for r in told.records],
        "start_times": [r.sent - told.start for r in told.records],
        "ttfts": [r.first - r.sent if r.chunks else None for r in told.records],
        "itls": [r.gaps.tolist() for r in told.records],
        "statuses": [r.status for r in told.records],
    }


def _warnings(busy: float, late: float, mixes: Sequence[Mix], each: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    if busy > _BUSY or late > _LATE_MS:
        found.append(
            f"the client was the bottleneck: its busiest process took {busy:.0%} of a core and was up to {late:.1f} ms "
            "late (p99); the server may be faster than these figures. Try more --client-processes"
        )
    for mix in mixes:
        delay = each[mix.name]["max_send_delay_ms"]
        if not mix.closed and delay > 100:
            found.append(
                f"mix {mix.name!r}: requests were sent up to {delay:.0f} ms late; latencies count from sending"
            )
    return found


class _Progress:
    """A progress line, updated in place on a terminal, and printed every ten seconds otherwise."""

    def __init__(self, err: IO[str], names: Sequence[str], shown: bool) -> None:
        self._err, self._names, self._shown = err, names, shown
        self._terminal, self._last, self._before = err.isatty(), 0.0, (0.0, 0)

    def show(self, seconds: float, counts: dict[str, list[int]]) -> None:
        if not self._shown or seconds - self._last < (0.45 if self._terminal else 10.0):
            return
        then, before = self._before
        tokens = sum(counts["tokens"])
        speed = (tokens - before) / max(seconds - then, 1e-3)
        self._last, self._before = seconds, (seconds, tokens)
        parts = [
            f"{name}: {counts['ok'][i]} done, {counts['open'][i]} open, {counts['failed'][i]} failed"
            for i, name in enumerate(self._names)
        ]
        line = f"{seconds:.0f} s, {max(speed, 0):.0f} tok/s; {'; '.join(parts)}"
        print(
            f"\r\x1b[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._err,
            flush=True,
        )

    def end(self) -> None:
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=self._err, flush=True)


def _text(report: Mapping[str, Any], wanted: Wanted) -> str:
    columns = dict(report["mixes"]) | {"together": report} if "mixes" in report else {"": report}
    lines = [
        Line("requests answered", "completed", "d"), Line("failed", "failed", "d"), Line("cut off", "cut", "d"),
        Line("seconds", "duration", ".2f"), Line("prompt tokens", "total_input_tokens", "d"),
        Line("output tokens", "total_output_tokens", "d"), Line("requests/s", "request_throughput", ".2f"),
        *([Line("good requests/s", "request_goodput", ".2f")] if wanted.goals else []),
        Line("output tokens/s", "output_throughput", ".1f"), Line("tokens/s", "total_token_throughput", ".1f"),
        Line("tokens a chunk", "tokens_per_chunk", ".2f"), Line("most open", "max_concurrent_requests", "d"),
    ]  # fmt: skip
    for name in wanted.metrics:
        lines.append(Line(f"{name.upper()} mean, ms", f"mean_{name}_ms", ".2f"))
        lines += [Line(f"{name.upper()} p{p:g}, ms", f"p{p:g}_{name}_ms", ".2f") for p in wanted.percentiles]
    text = table(lines, columns)
    return text + "".join(f"\nfailed, {count} times: {words}" for words, count in report["errors"].items())


def arguments(add: Any) -> None:
    """Declare the options, with vLLM's names if they have the same meaning."""
    add("--base-url", metavar="URL", help="URL of the server, with or without /v1 (default: from --host and --port)")
    add("--host", default="127.0.0.1", help="host of the server (127.0.0.1)")
    add("--port", type=int, default=8000, help="port of the server (8000)")
    add("--backend", choices=("openai", "vllm", "openai-chat"), help="kind of requests (completions)")
    add("--endpoint", choices=(COMPLETIONS, CHAT), help="path of the requests (default: that of --backend)")
    add("--model", metavar="NAME", help="model name in requests (default: the first of /v1/models)")
    add("--dataset-name", default="random", choices=("random", "custom", "sharegpt"), help="source of prompts (random)")
    add("--dataset-path", type=Path, metavar="FILE", help="JSON lines of prompts or messages, or ShareGPT JSON")
    add("--num-prompts", type=int, metavar="N", help="number of requests (1000; with --duration: no limit)")
    add("--duration", type=float, metavar="SECONDS", help="time in seconds during which requests are sent (no limit)")
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (inf: all at once)")
    add("--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson arrivals; more: more regular (1)")
    add("--max-concurrency", type=int, metavar="N", help="maximum number of open requests (no limit)")
    add("--random-input-len", type=int, default=1024, metavar="N", help="prompt length in tokens, chats: words (1024)")
    add("--random-output-len", type=int, default=128, metavar="N", help="output length in tokens (128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help="fraction by which lengths vary (0)")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="length of the shared prefix in tokens (0)")
    add("--random-num-prefixes", type=int, default=1, metavar="N", help="number of different prefixes (1)")
    add("--random-vocab-size", type=int, metavar="N", help="number of token ids (default: the server's, else 1000)")
    add("--mix", action="append", default=[], metavar="SPEC", help=_MIX)
    add("--ignore-eos", action="store_true", help="generate up to the requested length even after an end token")
    add("--extra-body", metavar="JSON", help="JSON object with fields added to every request")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (0)")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the measurement (1)")
    add("--client-processes", type=int, default=1, metavar="N", help="number of client processes (1)")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="timeout of a request in seconds (600)")
    add("--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help="of ttft,tpot,itl,e2el (all)")
    add("--metric-percentiles", default="50,90,99", metavar="LIST", help="percentiles to report (50,90,99)")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="latency objectives, e.g. ttft:500 tpot:25 (ms)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--save-result", action="store_true", help="write the result to a JSON file")
    add("--result-filename", metavar="FILE", help="file name of the saved result")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="folder of the saved result (.)")
    add("--save-detailed", action="store_true", help="include the figures of every request")
    add("--disable-tqdm", action="store_true", help="print no progress")
    add("--json", action="store_true", help="print JSON instead of a table")
