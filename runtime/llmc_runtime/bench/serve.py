"""`llmc bench serve`: puts a load on a running server, from options to report. Client processes send the requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from llmc_runtime import __version__
from llmc_runtime.bench import load_generator
from llmc_runtime.bench.figures import METRICS, ReportSpec, figures
from llmc_runtime.bench.messages import ClientResult, Plan
from llmc_runtime.bench.record import Record
from llmc_runtime.bench.request_bodies import CHAT, COMPLETIONS, Recipe, read_items
from llmc_runtime.bench.table import Line, table
from llmc_runtime.bench.workload import Mix, parse_mix
from llmc_runtime.defaults import json_object
from llmc_runtime.format.errors import LlmcError

_MIX = (
    "kind of requests to mix with others, repeatable: name=,rate=,burstiness=,concurrency=,num=,duration=,input=,"
    "output=,range_ratio=,prefix=,prefixes= (default of each: the other options)"
)
_GOODPUT = "service-level objectives in ms that count toward goodput, such as ttft:500 tpot:25"
_DEFAULT_PROMPTS = 1000  # number of prompts if neither a number nor a duration is set
_LIST_SECONDS = 30.0  # time limit of listing the models
_DEFAULT_VOCABULARY = 1000  # size of the vocabulary if neither the options nor the server state it
_BUSY, _LATE_MS = 0.85, 10.0  # acceptable use of a core and delay (99th percentile) of a client process


def run(args: argparse.Namespace, keys: Sequence[str], out: IO[str], err: IO[str]) -> int:
    """Run the measurement and print the report. Returns the exit status: 1 if a request failed.

    Raises LlmcError E670 or E671.
    """
    _check(args)
    args.endpoint = _endpoint(args)
    mixes, spec = mixes_of(args), _report_spec(args)
    plan = _plan(args, _base(args), mixes, keys)
    progress = _Progress(err, [mix.name for mix in mixes], not args.disable_tqdm)
    start, result = asyncio.run(load_generator.run(plan, args.client_processes, progress.show))
    progress.end()
    report = _report(args, plan, mixes, start, result, spec)
    for warning in report["warnings"]:
        print(f"llmc: {warning}", file=err)
    print(json.dumps(report, indent=1) if args.json else _text(report, spec), file=out)
    if args.save_result or args.result_filename:
        path = args.result_dir / (args.result_filename or time.strftime("llmc-bench-serve-%Y%m%d-%H%M%S.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"llmc: wrote {path}", file=err)
    return 1 if report["failed"] else 0


def _check(args: argparse.Namespace) -> None:
    """Raise LlmcError E670 if a number is too small."""
    minimums = {"num_prompts": 1, "random_vocab_size": 1, "client_processes": 1, "seed": 0, "num_warmups": 0}
    for name, low in minimums.items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and value < low:
            raise LlmcError("E670", f"{option} {value} is out of range", f"use an integer of at least {low}")
    if not args.request_timeout > 0:
        cause = f"--request-timeout {args.request_timeout:g} is out of range"
        raise LlmcError("E670", cause, "use a number of seconds above 0")


def _endpoint(args: argparse.Namespace) -> str:
    """Return the endpoint selected by --endpoint or --backend. Raises LlmcError E670 if they disagree."""
    named = CHAT if args.backend == "openai-chat" else COMPLETIONS
    if args.backend is not None and args.endpoint not in (None, named):
        raise LlmcError(
            "E670", f"--backend {args.backend} uses {named}, not {args.endpoint}", "pass only one of the two options"
        )
    return str(args.endpoint or named)


def _base(args: argparse.Namespace) -> SplitResult:
    """Return the server's base URL, without /v1. Raises LlmcError E670."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = args.base_url or f"http://{host}:{args.port}"
    try:
        base = urlsplit(url)
        valid = base.scheme in ("http", "https") and base.hostname and base.port != 0
    except ValueError:  # invalid port or IPv6 address
        valid = False
    if not valid:
        raise LlmcError(
            "E670", f"{url!r:.80} is not a server's URL", "write for example --base-url http://127.0.0.1:8000"
        )
    return base._replace(path=base.path.rstrip("/").removesuffix("/v1").rstrip("/"))


def mixes_of(args: argparse.Namespace) -> list[Mix]:
    """Return the mixes of --mix, or the one described by the other options. Raises LlmcError E670."""
    count = args.num_prompts or (None if args.duration else _DEFAULT_PROMPTS)
    default = Mix(
        "all", args.request_rate, args.burstiness, args.max_concurrency, count, args.duration,
        args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len,
        args.random_num_prefixes,
    )  # fmt: skip
    mixes = [parse_mix(text, default) for text in args.mix] or [default]
    if len({mix.name for mix in mixes}) < len(mixes):
        raise LlmcError("E670", "two mixes have the same name", "use a different name=NAME in each --mix")
    return mixes


def _report_spec(args: argparse.Namespace) -> ReportSpec:
    goals = {}
    for text in args.goodput:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = math.nan
        if name not in METRICS or not goals[name] > 0:
            raise LlmcError(
                "E670", f"--goodput {text!r:.40} is not an objective", "use METRIC:MS, as in ttft:500 tpot:25"
            )
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    unknown = [name for name in metrics if name not in METRICS]
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",") if p]
    except ValueError:
        percentiles = [math.nan]
    if unknown or not all(0 <= p <= 100 for p in percentiles):
        cause = f"--percentile-metrics or --metric-percentiles: {unknown or args.metric_percentiles!r}"
        raise LlmcError("E670", cause, f"use some of {','.join(METRICS)}; numbers from 0 to 100, as in 50,90,99")
    return ReportSpec(metrics, percentiles, goals or None)


def _plan(args: argparse.Namespace, base: SplitResult, mixes: Sequence[Mix], keys: Sequence[str]) -> Plan:
    """Return the plan for the client processes, with information requested from the server. Raises LlmcError E671."""
    tls, host = base.scheme == "https", base.hostname or ""
    port = base.port or (443 if tls else 80)
    key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    model, vocabulary = args.model, args.random_vocab_size
    if model is None or (vocabulary is None and args.dataset_name == "random"):
        connection = (HTTPSConnection if tls else HTTPConnection)(host, port, timeout=_LIST_SECONDS)
        card = _model(connection, f"{base.path}/v1/models", key, model)
        model, vocabulary = card["id"], vocabulary or card.get("vocab_size")
    items = []
    if args.dataset_name != "random":
        if args.dataset_path is None:
            raise LlmcError("E670", f"--dataset-name {args.dataset_name} needs a file", "add --dataset-path FILE")
        items = read_items(args.dataset_path, args.dataset_name, args.endpoint)
    recipe = Recipe(
        args.endpoint,
        model,
        vocabulary or _DEFAULT_VOCABULARY,
        args.seed,
        args.ignore_eos,
        items,
        _extra(args.extra_body),
    )
    headers = {"Host": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", **key}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | {"Content-Type": "application/json"}).items())
    head = f"POST {base.path}{args.endpoint} HTTP/1.1\r\n{lines}"
    return Plan(host, port, tls, head, recipe, mixes, args.num_warmups, args.request_timeout)


def _extra(text: str | None) -> dict[str, Any]:
    extra = json_object(text or "{}")
    if extra is None:
        raise LlmcError(
            "E670", f"--extra-body {text!r:.60} is not a JSON object", """write for example '{"top_p": 0.9}'"""
        )
    return extra


def _model(connection: HTTPConnection, path: str, headers: Mapping[str, str], model: str | None) -> dict[str, Any]:
    """Return the entry of `model` in the list at `path`, or the first entry if it is None. Raises LlmcError E671."""
    try:
        connection.request("GET", path, headers=dict(headers))
        reply = connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise HTTPException(f"HTTP {reply.status}: {body[:200].decode(errors='replace')}")
        cards = json.loads(body)["data"]
        entry: dict[str, Any] = next((card for card in cards if card["id"] == model), cards[0] if not model else {})
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as e:
        cause = f"the models of {connection.host}:{connection.port} cannot be listed: {type(e).__name__}: {e}"
        raise LlmcError("E671", cause[:300], "check that it runs, or pass --model and --random-vocab-size") from None
    finally:
        connection.close()
    return {"id": model, **entry}


def _report(
    args: argparse.Namespace, plan: Plan, mixes: Sequence[Mix], start: float, result: ClientResult, spec: ReportSpec
) -> dict[str, Any]:
    late = float(np.percentile(result.late, 99)) * 1e3 if result.late else 0.0  # p99 of delays in sending, ms
    total = figures(result.records, start, spec)
    by_mix = {}
    for i, mix in enumerate(mixes):
        by_mix[mix.name] = figures([r for r in result.records if r.mix == i], start, spec)
    only_mix = mixes[0] if len(mixes) == 1 else None
    report = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "backend": args.backend or "openai", "endpoint": args.endpoint,
        "model_id": plan.recipe.model, "version": __version__, "seed": args.seed,
        "num_prompts": len(result.records), "client_processes": args.client_processes,
        "request_rate": only_mix.to_json()["rate"] if only_mix else None,
        "burstiness": only_mix.burstiness if only_mix else None,
        "max_concurrency": only_mix.max_concurrency if only_mix else None,
        **total,
        "goals": dict(spec.goals or {}),
        "client": {"busiest_process": result.busy, "p99_late_ms": late},
    }  # fmt: skip
    if only_mix is None:
        report["mixes"] = {mix.name: {"mix": mix.to_json(), **by_mix[mix.name]} for mix in mixes}
    if args.save_detailed:
        report |= _detailed(result.records, start)
    return report | {"warnings": _warnings(result.busy, late, mixes, by_mix)}


def _detailed(records: Sequence[Record], start: float) -> dict[str, list[Any]]:
    """Return lists with one value per request; times are in seconds, as in vLLM."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "start_times": [r.sent - start for r in records],
        "ttfts": [r.first - r.sent if r.chunks else None for r in records],
        "itls": [r.gaps.tolist() for r in records],
        "statuses": [r.status for r in records],
    }


def _warnings(busy: float, late: float, mixes: Sequence[Mix], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    warnings = []
    if busy > _BUSY or late > _LATE_MS:
        warnings.append(
            f"the client was the bottleneck: its busiest process used {busy:.0%} of a core and was up to {late:.1f} ms "
            "late (p99); the server may be faster than these figures. Try more --client-processes"
        )
    for mix in mixes:
        delay = results[mix.name]["max_send_delay_ms"]
        if not mix.closed and delay > 100:
            warnings.append(
                f"mix {mix.name!r}: requests were sent up to {delay:.0f} ms late; latencies count from sending"
            )
    return warnings


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


def _text(report: Mapping[str, Any], spec: ReportSpec) -> str:
    columns = dict(report["mixes"]) | {"total": report} if "mixes" in report else {"": report}
    lines = [
        Line("completed requests", "completed", "d"), Line("failed", "failed", "d"), Line("cut off", "cut", "d"),
        Line("seconds", "duration", ".2f"), Line("prompt tokens", "total_input_tokens", "d"),
        Line("output tokens", "total_output_tokens", "d"), Line("requests/s", "request_throughput", ".2f"),
        *([Line("good requests/s", "request_goodput", ".2f")] if spec.goals else []),
        Line("output tokens/s", "output_throughput", ".1f"), Line("tokens/s", "total_token_throughput", ".1f"),
        Line("tokens per chunk", "tokens_per_chunk", ".2f"), Line("peak open requests", "max_concurrent_requests", "d"),
    ]  # fmt: skip
    for name in spec.metrics:
        lines.append(Line(f"{name.upper()} mean, ms", f"mean_{name}_ms", ".2f"))
        lines += [Line(f"{name.upper()} p{p:g}, ms", f"p{p:g}_{name}_ms", ".2f") for p in spec.percentiles]
    text = table(lines, columns)
    return text + "".join(f"\nfailed, {count} times: {error}" for error, count in report["errors"].items())


def arguments(add: Any) -> None:
    """Declare the options, with vLLM's names if they have the same meaning."""
    add("--base-url", metavar="URL", help="URL of the server, with or without /v1 (default: from --host and --port)")
    add("--host", default="127.0.0.1", help="address of the server (127.0.0.1)")
    add("--port", type=int, default=8000, help="port of the server (8000)")
    add("--backend", choices=("openai", "vllm", "openai-chat"), help="API to use: completions, or chats (openai-chat)")
    add("--endpoint", choices=(COMPLETIONS, CHAT), help=f"path of the API (default: from --backend, or {COMPLETIONS})")
    add("--model", metavar="NAME", help="name of the model (default: the first of /v1/models)")
    add("--dataset-name", default="random", choices=("random", "custom", "sharegpt"), help="source of prompts (random)")
    add("--dataset-path", type=Path, metavar="FILE", help="JSON lines of a prompt or messages, or ShareGPT's JSON")
    add("--num-prompts", type=int, metavar="N", help="number of requests (1000, or as many as fit into --duration)")
    add("--duration", type=float, metavar="SECONDS", help="seconds after which no request starts (default: no limit)")
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (inf)")
    add("--burstiness", type=float, default=1.0, metavar="X", help="regularity of arrivals; 1: Poisson process (1)")
    add("--max-concurrency", type=int, metavar="N", help="maximum number of open requests (default: no limit)")
    add(
        "--random-input-len",
        type=int,
        default=1024,
        metavar="N",
        help="length of prompts in tokens (chats: words) (1024)",
    )
    add("--random-output-len", type=int, default=128, metavar="N", help="length of outputs in tokens (128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="X", help="relative variation of both lengths (0)")
    add("--random-prefix-len", type=int, default=0, metavar="N", help="length of shared prefixes in tokens (0)")
    add("--random-num-prefixes", type=int, default=1, metavar="N", help="number of different prefixes (1)")
    add("--random-vocab-size", type=int, metavar="N", help="size of the vocabulary (default: the server's, or 1000)")
    add("--mix", action="append", default=[], metavar="SPEC", help=_MIX)
    add("--ignore-eos", action="store_true", help="always generate the maximum number of tokens")
    add("--extra-body", metavar="JSON", help="fields to add to every request, as a JSON object")
    add("--seed", type=int, default=0, metavar="N", help="seed of requests and arrival times (0)")
    add("--num-warmups", type=int, default=1, metavar="N", help="number of requests before the measured ones (1)")
    add("--client-processes", type=int, default=1, metavar="N", help="number of processes that send requests (1)")
    add("--request-timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of a request (600)")
    add(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="NAMES",
        help="metrics to report: some of ttft,tpot,itl,e2el (all)",
    )
    add("--metric-percentiles", default="50,90,99", metavar="LIST", help="percentiles to report (50,90,99)")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=_GOODPUT)
    add("--api-key-env", metavar="NAME", help="environment variable with the API key (default: no key)")
    add("--save-result", action="store_true", help="also write the report to a file as JSON")
    add("--result-filename", metavar="FILE", help="name of the report's file (default: from the time)")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="folder of the report's file, created (.)")
    add("--save-detailed", action="store_true", help="include the figures of every request in the file")
    add("--disable-tqdm", action="store_true", help="print no progress")
    add("--json", action="store_true", help="print the report as JSON instead of a table")
