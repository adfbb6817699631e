"""Requests alone and in random mixtures: compares the bits of all log-probabilities of a deterministic artifact.

    python tests/mixtures.py ARTIFACT [--requests 10000] [--seed N] [--share 0.5]

Every request is computed alone first. Then engines with other limits compute them in random batches: in small chunks,
with few rows, with a KV cache so small that requests are preempted, with and without the prefix cache, and on devices
that overlap steps, all of it without overlap, too. Then engines that replace one another continue requests from a
random number of their tokens. At last every text is scored as a prompt, whose log-probabilities must be those with
which it was generated.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from llmc_runtime import LLM, SamplingParams
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams

TOP = 2  # likeliest ids that are compared
STEMS = 6  # beginnings that prompts share
OUTPUTS = 40  # maximum tokens that a request generates
REGEXES = ("[a-z ]+", "(yes|no|perhaps)( [A-Z]+)*", r"\d{3,9}")  # of guided requests
SCORED = 5  # every so many requests also ask for the log-probabilities of the prompt
RESTARTS = 4  # engines, one after another, that continue requests
PROGRESS = 30  # seconds between two lines about the requests alone
PREEMPTION, TRIES = "with preemption", 8  # the name of an engine, and how often it computes the requests at most


@dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def continues(self) -> bool:
        """Whether the prompt with some tokens of the output goes on as the request does: no parameter depends on what
        is output, and what is prompt.
        """
        p = self.params
        depends = p.presence_penalty or p.frequency_penalty or p.min_tokens or p.structured_outputs is not None
        return p.n == 1 and not depends


@dataclass(frozen=True)
class Result:
    """The texts that a request generates, as tokens with the bits of their rows of log-probabilities, one after the
    other, the length of each, and the bits of the prompt's rows.
    """

    tokens: tuple[int, ...]
    rows: tuple[bytes, ...]
    prompt_rows: tuple[bytes, ...]
    lengths: tuple[int, ...]

    @property
    def texts(self) -> list[slice]:
        """The place of each text in tokens and rows."""
        ends = np.cumsum(self.lengths).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]


@dataclass
class Report:
    """The number of comparisons, and the differences as texts."""

    compared: int = 0
    preemptions: int = 0
    hits: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, what: str, index: int, want: Sequence[Any], found: Sequence[Any]) -> None:
        """Compare two sequences of values."""
        self.compared += len(want)
        if len(want) != len(found):
            self.differences.append(f"{what}, request {index}: {len(found)} values instead of {len(want)}")
            return
        wrong = [i for i, (a, b) in enumerate(zip(want, found, strict=True)) if a != b]
        if wrong:
            self.differences.append(f"{what}, request {index}: {len(wrong)} of {len(want)}, the first at {wrong[0]}")


def draw(rng: np.random.Generator, count: int, manifest: Manifest, longest: int) -> list[Request]:
    """Draw requests of at most `longest` tokens, including output; half of them share a prefix with another."""
    vocab = manifest.vocab_size
    stems = [rng.integers(3, vocab, int(n)).tolist() for n in rng.integers(1, longest // 2, STEMS)]
    requests = []
    for i in range(count):
        outputs = int(rng.integers(1, min(OUTPUTS, longest // 4)))
        own = rng.integers(3, vocab, int(rng.integers(1, longest // 2 - outputs))).tolist()
        prompt = [*stems[int(rng.integers(STEMS))], *own] if rng.random() < 0.5 else own
        drawn: dict[str, Any] = {
            "temperature": float(rng.choice([0.0, 0.8, 1.4])),
            "top_p": float(rng.choice([1.0, 0.9])),
            "top_k": int(rng.choice([0, 20])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
        }
        drawn |= further(rng, vocab, outputs, guided=any("tokenizer.json" in name for name in manifest.tokenizer))
        params = SamplingParams(
            **drawn,
            max_tokens=outputs,
            seed=i,
            logprobs=TOP,
            prompt_logprobs=TOP if i % SCORED == 0 else None,
            detokenize=False,
            ignore_eos=True,
        )
        requests.append(Request(tuple(prompt), params))
    return requests


def further(rng: np.random.Generator, vocab: int, outputs: int, guided: bool) -> dict[str, Any]:
    """Draw parameters that a third of the requests have. guided: the artifact has a tokenizer, which grammars need."""
    some = sorted(rng.choice(vocab, min(40, vocab), replace=False).tolist())
    drawn: list[dict[str, Any]] = [
        {"min_p": float(rng.uniform(0.01, 0.3))},
        {"presence_penalty": float(rng.uniform(-2, 2)), "frequency_penalty": float(rng.uniform(-2, 2))},
        {"logit_bias": {token: float(rng.uniform(-9, 9)) for token in some}},
        {"allowed_token_ids": some},
        {"min_tokens": int(rng.integers(0, outputs + 1)), "stop_token_ids": some[:20]},
        {"n": int(rng.integers(2, 5)), "temperature": 1.0},
    ]
    if guided:
        drawn.append({"structured_outputs": StructuredOutputsParams(regex=str(rng.choice(REGEXES)))})
    return drawn[int(rng.integers(len(drawn)))] if rng.random() < 1 / 3 else {}


def bits(row: Any) -> bytes:
    """Return the bits of a row of log-probabilities: ids, values and ranks."""
    return b"".join(struct.pack("<qdq", k, x.logprob, x.rank or 0) for k, x in row.items())


def generate(llm: LLM, requests: Sequence[Request]) -> list[Result]:
    """Compute requests in one batch."""
    prompts: list[Any] = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    outputs = llm.generate(prompts, [r.params for r in requests], use_tqdm=False)
    results = []
    for o in outputs:
        tokens = tuple(token for text in o.outputs for token in text.token_ids)
        rows = tuple(bits(row) for text in o.outputs for row in text.logprobs or ())
        scores = tuple(bits(row) for row in (o.prompt_logprobs or [None])[1:])
        results.append(Result(tokens, rows, scores, tuple(len(text.token_ids) for text in o.outputs)))
    return results


def engines(manifest: Manifest, longest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the options of engines that divide the work differently; `longest`: tokens of a text."""
    limits = manifest.limits
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    pages = -(-longest // manifest.kv.page_size) + 1
    yield "in large batches", {"enable_prefix_caching": False}
    yield "in chunks of 7 tokens", {"max_num_batched_tokens": min(7, tokens), "max_num_seqs": min(5, rows)}
    yield "in chunks of 33 tokens, with cached prefixes", {"max_num_batched_tokens": min(33, tokens)}
    yield "in 3 rows", {"max_num_seqs": min(3, rows), "enable_prefix_caching": False}
    if any(s.role == "drafts" for s in manifest.states):
        yield "with drafts", {"speculate": "ngram:2"}
    yield PREEMPTION, {"kv_cache_memory_bytes": pages * manifest.kv.bytes_per_page}


def batches(rng: np.random.Generator, count: int, rows: int, share: float = 1) -> Iterator[list[int]]:
    """Yield the indices of a share of all requests in random order, in batches of random sizes."""
    order, at = rng.permutation(count)[: max(1, round(share * count))].tolist(), 0
    while at < len(order):
        size = int(rng.integers(1, 4 * rows))
        yield order[at : at + size]
        at += size


def quiet(text: str) -> None:
    return


def opened(path: Path, options: dict[str, Any], depth: int = 0) -> LLM:
    """Open an engine; `depth` is the maximum number of its steps in flight, 0 for the device's."""
    llm = LLM(path, say=quiet, **options)
    if depth:
        llm.engine.executor.depth = llm.engine.scheduler.depth = depth
    return llm


def check(path: Path, requests: Sequence[Request], seed: int, say: Any = quiet, share: float = 1) -> Report:
    """Compute the requests alone and in mixtures, and return a report of the differences.

    Every engine computes a random `share` of the requests.
    """
    report, rng = Report(), np.random.default_rng(seed)
    manifest = Manifest.load((path / "manifest.json").read_bytes())
    longest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in requests)
    alone, depth = one_by_one(path, requests, say)
    for limit in (0, 1) if depth > 1 else (0,):
        for name, options in engines(manifest, longest):
            what = f"{name}{', no overlap' if limit else ''}"
            with opened(path, options, limit) as llm:
                for _ in range(TRIES if name == PREEMPTION else 1):
                    for batch in batches(rng, len(requests), manifest.limits.max_num_seqs, share):
                        mixed(llm, batch, requests, alone, report, what)
                    if llm.stats()["num_preemptions"]:
                        break  # few requests may happen to fit
                report.preemptions += llm.stats()["num_preemptions"]
                report.hits += llm.stats()["prefix_cache_hits"]
            say(f"{what}: {len(report.differences)} differences so far")
    for _ in range(RESTARTS):
        with opened(path, {}) as llm:
            for batch in batches(rng, len(requests), llm.config.max_num_seqs, share / RESTARTS):
                resume(llm, batch, requests, alone, rng, report)
    say(f"continued after restarts: {len(report.differences)} differences so far")
    with opened(path, {}) as llm:
        for batch in batches(rng, len(requests), llm.config.max_num_seqs, share):
            rescore(llm, batch, requests, alone, report)
    say(f"scored as prompts: {len(report.differences)} differences in {report.compared} values")
    return report


def one_by_one(path: Path, requests: Sequence[Request], say: Any) -> tuple[list[Result], int]:
    """Return the results of the requests, each computed alone, and the number of steps that the device overlaps."""
    alone, said = [], time.monotonic()
    with opened(path, {"enable_prefix_caching": False}) as llm:
        for request in requests:
            alone += generate(llm, [request])
            if time.monotonic() > said + PROGRESS:
                said = time.monotonic()
                say(f"{len(alone)} of {len(requests)} requests alone")
        depth = llm.engine.executor.depth
    say(f"{len(requests)} requests alone")
    return alone, depth


def mixed(
    llm: LLM, batch: Sequence[int], requests: Sequence[Request], alone: Sequence[Result], report: Report, what: str
) -> None:
    """Compute a batch, and compare it with the requests alone."""
    for i, found in zip(batch, generate(llm, [requests[i] for i in batch]), strict=True):
        report.compare(f"{what}: tokens", i, alone[i].tokens, found.tokens)
        report.compare(f"{what}: log-probabilities", i, alone[i].rows, found.rows)
        report.compare(f"{what}: those of the prompt", i, alone[i].prompt_rows, found.prompt_rows)


def resume(
    llm: LLM, batch: Sequence[int], requests: Sequence[Request], alone: Sequence[Result], rng: np.random.Generator,
    report: Report,
) -> None:  # fmt: skip
    """Continue requests from a random number of their tokens, as after a restart, and compare the rest."""
    batch = [i for i in batch if requests[i].continues]
    kept = {i: int(rng.integers(len(alone[i].tokens))) for i in batch}
    rest = [resumed(requests[i], alone[i].tokens[: kept[i]]) for i in batch]
    for i, found in zip(batch, generate(llm, rest), strict=True):
        report.compare("continued: tokens", i, alone[i].tokens[kept[i] :], found.tokens)
        report.compare("continued: log-probabilities", i, alone[i].rows[kept[i] :], found.rows)


def resumed(request: Request, tokens: tuple[int, ...]) -> Request:
    """Return the request that computes the rest, after `tokens` have been generated."""
    params = replace(request.params, max_tokens=(request.params.max_tokens or 0) - len(tokens), prompt_logprobs=None)
    return Request((*request.prompt, *tokens), params)


def rescore(
    llm: LLM, batch: Sequence[int], requests: Sequence[Request], alone: Sequence[Result], report: Report
) -> None:
    """Score texts as prompts, and compare the rows of the generated tokens with those of the generation."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    places = [(i, text) for i in batch for text in alone[i].texts]
    texts = [Request((*requests[i].prompt, *alone[i].tokens[text]), params) for i, text in places]
    for (i, text), found in zip(places, generate(llm, texts), strict=True):
        rows = alone[i].rows[text]
        report.compare("scored", i, rows, found.prompt_rows[len(found.prompt_rows) - len(rows) :])


def main() -> None:
    ap = argparse.ArgumentParser(description="compare requests alone and in random mixtures, bit for bit")
    ap.add_argument("artifact", type=Path)
    ap.add_argument("--requests", type=int, default=10000, metavar="N")
    ap.add_argument("--longest", type=int, default=96, metavar="N", help="maximum length of a text (96)")
    ap.add_argument("--seed", type=int, default=0, metavar="N")
    ap.add_argument("--share", type=float, default=1, metavar="X", help="of the requests, in every engine (1)")
    args = ap.parse_args()
    manifest = Manifest.load((args.artifact / "manifest.json").read_bytes())
    requests = draw(np.random.default_rng(args.seed), args.requests, manifest, args.longest)
    start = time.monotonic()
    seconds = lambda: round(time.monotonic() - start)  # noqa: E731
    report = check(
        args.artifact, requests, args.seed, lambda text: print(f"{seconds()} s: {text}", flush=True), args.share
    )
    print(
        f"{args.requests} requests, {report.compared} values compared, {report.preemptions} preemptions, "
        f"{report.hits} tokens from the prefix cache, {seconds()} s: "
        f"{len(report.differences)} requests differ"
    )
    for text in report.differences[:20]:
        print(f"  {text}")
    sys.exit(bool(report.differences))


if __name__ == "__main__":
    main()
