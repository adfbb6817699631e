"""A traffic mix: the number, sizes and arrival times of requests.

If several processes share a mix, request i belongs to process i % participants. Each process draws all arrival times
and sizes from the same seed, so that the requests do not depend on the number of processes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from llmc_runtime.format.errors import LlmcError

_SHORT = {"num": "num_prompts", "concurrency": "max_concurrency", "input": "input_len", "output": "output_len",
          "prefix": "prefix_len", "prefixes": "num_prefixes"}.items()  # fmt: skip
_INTEGERS = frozenset({"num_prompts", "max_concurrency", "input_len", "output_len", "prefix_len", "num_prefixes"})


@dataclass(frozen=True)
class Mix:
    """One kind of traffic. Raises LlmcError E670 for invalid values.

    - `rate`: requests per second (inf: each as soon as possible)
    - `burstiness`: shape of the intervals' gamma distribution; 1 is a Poisson process, larger values are more regular
    - `max_concurrency`: maximum number of open requests (None: unlimited)
    - `num_prompts`: number of requests (None: as many as fit into `duration`)
    - `duration`: seconds after which no request is started (None: until num_prompts are done); the open streams of a
      mix without a rate are then cut off
    - `input_len`: tokens of a prompt, without its prefix
    - `output_len`: tokens to generate
    - `range_ratio`: both lengths vary uniformly within plus or minus this fraction
    - `prefix_len`: tokens of the prefix that prompts share; `num_prefixes`: number of different prefixes
    """

    name: str = "all"
    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_prompts: int | None = None
    duration: float | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        checks = {
            "rate": self.rate > 0,
            "burstiness": 0 < self.burstiness < math.inf,
            "max_concurrency": self.max_concurrency is None or self.max_concurrency > 0,
            "num_prompts": self.num_prompts is None or self.num_prompts > 0,
            "duration": self.duration is None or 0 < self.duration < math.inf,
            "input_len": self.input_len > 0,
            "output_len": self.output_len > 0,
            "range_ratio": 0 <= self.range_ratio < 1,
            "prefix_len": self.prefix_len >= 0,
            "num_prefixes": self.num_prefixes > 0,
        }
        for name, valid in checks.items():
            if not valid:
                cause = f"mix {self.name!r}: {name} = {getattr(self, name)!r} is out of range"
                raise LlmcError("E670", cause, "see llmc bench serve --help")
        if self.num_prompts is None and self.duration is None:
            raise LlmcError("E670", f"mix {self.name!r} never ends", "add num=N or duration=SECONDS")
        if self.num_prompts is None and self.rate == math.inf and self.max_concurrency is None:
            cause = f"mix {self.name!r} would send an unlimited number of requests at once"
            raise LlmcError("E670", cause, "add rate=R or concurrency=N")

    @property
    def closed(self) -> bool:
        """Whether a request is sent when another one ends (a closed loop), instead of at its own time."""
        return self.rate == math.inf

    def participants(self, processes: int) -> int:
        """Return how many of the client processes take part."""
        return min(processes, self.max_concurrency or processes, self.num_prompts or processes)

    def share(self, process: int, processes: int) -> int | None:
        """Return this process's share of `max_concurrency`; None: unlimited."""
        if self.max_concurrency is None:
            return None
        participants = self.participants(processes)
        return self.max_concurrency // participants + (process < self.max_concurrency % participants)

    def arrivals(self, seed: str) -> Iterator[float]:
        """Yield the seconds after the start at which requests 0, 1, ... are due.

        The random intervals are scaled to a mean of exactly 1 / rate, so that every seed requests the same amount of
        work.
        """
        if self.closed:
            yield from itertools.repeat(0.0) if self.num_prompts is None else itertools.repeat(0.0, self.num_prompts)
            return
        rng = random.Random(f"{seed}/{self.name}/arrivals")
        fit = None if self.duration is None else max(1, round(self.rate * self.duration))
        count = min(n for n in (self.num_prompts, fit) if n is not None)
        gaps = [rng.gammavariate(self.burstiness, 1.0) for _ in range(count)]
        stretch = count / self.rate / (math.fsum(gaps) or 1.0)
        for before in itertools.accumulate(gaps[:-1], initial=0.0):
            yield before * stretch

    def sizes(self, seed: str) -> Iterator[tuple[int, int]]:
        """Yield (input_len, output_len) of requests 0, 1, ..., without end."""
        rng = random.Random(f"{seed}/{self.name}/sizes")
        while True:
            yield self._drawn(rng, self.input_len), self._drawn(rng, self.output_len)

    def _drawn(self, rng: random.Random, size: int) -> int:
        if not self.range_ratio:
            return size
        low, high = math.floor(size * (1 - self.range_ratio)), math.ceil(size * (1 + self.range_ratio))
        return rng.randint(max(low, 1), high)

    def to_json(self) -> dict[str, Any]:
        """Return the mix as JSON values."""
        return asdict(self) | {"rate": "inf" if self.closed else self.rate}


def parse_mix(text: str, default: Mix) -> Mix:
    """Parse a mix such as "name=prompts,rate=8,input=2000,output=16,duration=120". Raises LlmcError E670.

    Missing values are those of `default`, except the number of requests, the concurrency and the rate, which belong to
    one mix.
    """
    values: dict[str, Any] = asdict(default) | {"num_prompts": None, "max_concurrency": None, "rate": math.inf}
    known, short = {field.name for field in fields(Mix)}, dict(_SHORT)
    for part in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = part.partition("=")
        name = short.get(key.strip(), key.strip().replace("-", "_"))
        if name not in known:
            names = ", ".join(sorted({*known, *short}))
            raise LlmcError("E670", f"--mix: unknown key {key!r:.40}", f"use one of {names}")
        if name == "name":
            values[name] = value.strip()
            continue
        try:
            values[name] = int(value) if name in _INTEGERS else float(value)
        except ValueError:
            raise LlmcError(
                "E670", f"--mix: {key} = {value!r:.40} is not a number", "write for example rate=8,input=2000"
            ) from None
    return Mix(**values)
