"""A mix: how many requests of which sizes come when. It sends nothing.

Where several processes share a mix, request i belongs to process i % sharers; each of them draws every arrival and
every size from the same seed, so that the requests are the same however many processes there are.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from llmc_runtime.format.errors import LlmcError

_SHORT = {"num": "num_prompts", "concurrency": "max_concurrency", "input": "input_len", "output": "output_len",
          "prefix": "prefix_len", "prefixes": "num_prefixes"}.items()  # fmt: skip
_WHOLE = frozenset({"num_prompts", "max_concurrency", "input_len", "output_len", "prefix_len", "num_prefixes"})


@dataclass(frozen=True)
class Mix:
    """One kind of load. LlmcError E670 where it makes no sense.

    rate             requests a second (inf: each as soon as it may)
    burstiness       shape of the gamma distribution of the intervals; 1: a Poisson process, more: more even
    max_concurrency  most requests open at a time (None: any)
    num_prompts      requests in all (None: as many as fit into `duration`)
    duration         seconds after which no request starts any more (None: until num_prompts are done); streams
                     of a mix without a rate, which would go on, are cut off then
    input_len        tokens of a prompt behind its prefix; output_len: tokens asked for; both vary evenly within
                     plus or minus range_ratio of themselves
    prefix_len       tokens that prompts share, in `num_prefixes` kinds
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
        for name, right in checks.items():
            if not right:
                cause = f"mix {self.name!r}: {name} = {getattr(self, name)!r} is not possible"
                raise LlmcError("E670", cause, "see llmc bench serve --help")
        if self.num_prompts is None and self.duration is None:
            raise LlmcError("E670", f"mix {self.name!r} never ends", "give num=N or duration=SECONDS")
        if self.num_prompts is None and self.rate == math.inf and self.max_concurrency is None:
            cause = f"mix {self.name!r} would send without bounds"
            raise LlmcError("E670", cause, "give rate=R or concurrency=N beside duration=SECONDS")

    @property
    def closed(self) -> bool:
        """Requests come as others end, not at times of their own."""
        return self.rate == math.inf

    def sharers(self, processes: int) -> int:
        """How many of so many client processes take part."""
        return min(processes, self.max_concurrency or processes, self.num_prompts or processes)

    def share(self, process: int, processes: int) -> int | None:
        """Of `max_concurrency`, what this process may have open; None: any number."""
        if self.max_concurrency is None:
            return None
        sharers = self.sharers(processes)
        return self.max_concurrency // sharers + (process < self.max_concurrency % sharers)

    def arrivals(self, seed: str) -> Iterator[float]:
        """Seconds after the start at which requests 0, 1, ... are due, as many as there are. The drawn intervals are
        stretched to a mean of exactly 1 / rate, so that no seed asks for more work than another one."""
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
        """(input_len, output_len) of requests 0, 1, ... without end."""
        rng = random.Random(f"{seed}/{self.name}/sizes")
        while True:
            yield self._drawn(rng, self.input_len), self._drawn(rng, self.output_len)

    def _drawn(self, rng: random.Random, size: int) -> int:
        if not self.range_ratio:
            return size
        low, high = math.floor(size * (1 - self.range_ratio)), math.ceil(size * (1 + self.range_ratio))
        return rng.randint(max(low, 1), high)

    def told(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"rate": "inf" if self.closed else self.rate}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Mix:
        """What `told` told."""
        return cls(**{**told, "rate": float(told["rate"])})


def parse_mix(text: str, default: Mix) -> Mix:
    """A mix from "name=prompts,rate=8,input=2000,output=16,duration=120"; what it leaves open is as in `default`, but
    its number, its concurrency and its rate, which belong to one mix. LlmcError E670."""
    values: dict[str, Any] = asdict(default) | {"num_prompts": None, "max_concurrency": None, "rate": math.inf}
    known, short = {field.name for field in fields(Mix)}, dict(_SHORT)
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, _, value = part.partition("=")
        name = short.get(key.strip(), key.strip().replace("-", "_"))
        if name not in known:
            names = ", ".join(sorted({*known, *short}))
            raise LlmcError("E670", f"--mix: there is no {key!r:.40}", f"one of {names}")
        try:
            values[name] = value.strip() if name == "name" else int(value) if name in _WHOLE else float(value)
        except ValueError:
            raise LlmcError("E670", f"--mix: {key} = {value!r:.40} is no number", "as in rate=8,input=2000") from None
    return Mix(**values)
