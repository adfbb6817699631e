"""The share of prompt tokens that a server, or a router before several servers, finds in its prefix caches.

    python -m bench.conversations http://127.0.0.1:8000/v1 [--conversations 16] [--turns 6] [--words 40] [--output 24]
                                  [--rounds 1] [--json FILE]

Conversations run at the same time. Every turn sends all messages before it, as chat clients do: a question of random
words, and the answers. Prints a row per round: prompt tokens, those of them that `usage` reports as cached, and
requests that failed. Rounds have different words, so that none finds those of another in the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = "river stone cloud lamp garden winter letter bridge silver forest window paper market island summer".split()
TIMEOUT = 120.0  # seconds of a request


@dataclass
class Counts:
    """Sums over requests: prompt tokens, cached ones, completion tokens, requests, and failed requests."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    requests: int = 0
    failed: int = 0

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def post(url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    """Send a JSON request and return the answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        out: dict[str, Any] = json.load(answer)
    return out


def first_model(url: str) -> str:
    """Return the name of the first model that the API lists."""
    with urllib.request.urlopen(f"{url}/models", timeout=TIMEOUT) as answer:
        return str(json.load(answer)["data"][0]["id"])


def conversation(plan: argparse.Namespace, model: str, seed: str) -> Counts:
    """Run one conversation; a failed request ends it."""
    rng, counts = random.Random(seed), Counts()
    messages: list[dict[str, str]] = []
    for _ in range(plan.turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=plan.words))})
        body = {"model": model, "messages": messages, "max_tokens": plan.output, "temperature": 0}
        counts.requests += 1
        try:
            answer = post(f"{plan.url}/chat/completions", body, plan.key)
        except (OSError, ValueError) as e:
            print(f"failed: {e}", file=sys.stderr, flush=True)
            counts.failed += 1
            break
        usage = answer["usage"]
        counts.prompt += usage["prompt_tokens"]
        counts.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts.completion += usage["completion_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    return counts


def one_round(plan: argparse.Namespace, model: str, number: int) -> tuple[Counts, float]:
    """Run all conversations at once; return their sums, and seconds."""
    total, begin = Counts(), time.perf_counter()
    with ThreadPoolExecutor(plan.conversations) as pool:
        names = [f"{plan.seed} {number} {i}" for i in range(plan.conversations)]
        for counts in pool.map(lambda name: conversation(plan, model, name), names):
            total.add(counts)
    return total, time.perf_counter() - begin


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(prog="python -m bench.conversations", description=(__doc__ or "").splitlines()[0])
    ap.add_argument("url", help="base URL of the API, which ends in /v1")
    ap.add_argument("--conversations", type=int, default=16, metavar="N", help="conversations at the same time (16)")
    ap.add_argument("--turns", type=int, default=6, metavar="N", help="requests of a conversation (6)")
    ap.add_argument("--words", type=int, default=40, metavar="N", help="random words of a question (40)")
    ap.add_argument("--output", type=int, default=24, metavar="N", help="maximum number of tokens of an answer (24)")
    ap.add_argument("--rounds", type=int, default=1, metavar="N", help="(1)")
    ap.add_argument("--model", default="", help="name of the model in requests (the first that the URL lists)")
    ap.add_argument("--key", default="", help="API key (none)")
    ap.add_argument("--seed", default="0", metavar="TEXT", help="seed of the words (0)")
    ap.add_argument("--json", type=Path, metavar="FILE", help="file for the figures of all rounds")
    return ap


def main(argv: list[str]) -> int:
    """Run the rounds and print a row each; return 1 if a request failed."""
    plan = parser().parse_args(argv)
    model = plan.model or first_model(plan.url)
    head = ("round", "prompt tokens", "cached", "share", "requests", "failed", "output tokens/s")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    rows = []
    for number in range(plan.rounds):
        c, seconds = one_round(plan, model, number)
        rows.append({**vars(c), "seconds": seconds})
        print(
            f"| {number} | {c.prompt} | {c.cached} | {c.cached / max(1, c.prompt):.3f} | {c.requests} | {c.failed} "
            f"| {c.completion / seconds:.0f} |",
            flush=True,
        )
    if plan.json:
        plan.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
