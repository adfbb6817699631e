"""Router: which of several engines gets a request. It does no IO; its only input is what the front end has sent.

A request goes to the engine with the least cost: the prompt tokens that it would have to compute, those that are queued
there, and OPEN_SEQUENCE_TOKENS for each open sequence. Engines with more than their share of the open sequences are
left out, and so are engines whose rows are all in use while another has a free one. What an engine has cached is
estimated: the pages of the prompts that it got last. If there are too many, those of the tenant that has most are
forgotten, as its prefix cache does.

Pages are compared by `hash` of their bytes and of the page before, which takes a quarter of the time of the prefix
cache's SHA-256: two different pages with one hash, which a client cannot find as the function has a secret key in each
process, would only send a request to the wrong engine.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OPEN_SEQUENCE_TOKENS = 32  # cost of an open sequence, in prompt tokens
MAX_LOAD_RATIO = 1.5  # an engine may have this many times the mean of open sequences, plus one
MAX_PAGES_HELD = 1 << 17  # remembered pages, over all engines
MAX_PAGES = 1024  # pages of a prompt that are compared; the time to hash more would delay the event loop


@dataclass(slots=True)
class Load:
    """The load that was sent to an engine: prompt tokens of requests without a first token yet, and open sequences."""

    queued_tokens: int = 0
    sequences: int = 0


def below_share(loads: Mapping[int, Load]) -> list[int]:
    """Return the engines, at least one, with at most MAX_LOAD_RATIO times the mean of open sequences, plus one."""
    limit = MAX_LOAD_RATIO * sum(load.sequences for load in loads.values()) / len(loads) + 1
    return [engine for engine, load in loads.items() if load.sequences < limit]


class HeldPages:
    """The pages that an engine has probably cached: their hashes by tenant, the latest last, at most `bound`."""

    def __init__(self, bound: int) -> None:
        self._bound, self._count = bound, 0
        self._of: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all pages."""
        self._of.clear()
        self._count = 0

    def matched(self, tenant: str, chain: Sequence[int]) -> int:
        """Return how many of the first pages of a prompt are held."""
        pages = self._of.get(tenant, OrderedDict[int, None]())
        return next((index for index, page in enumerate(chain) if page not in pages), len(chain))

    def add(self, tenant: str, chain: Sequence[int]) -> None:
        """Hold the pages of a prompt. First pages are the last to be forgotten, since the others follow them."""
        tenant_pages = self._of.setdefault(tenant, OrderedDict())
        before = len(tenant_pages)
        for page in reversed(chain):
            tenant_pages[page] = None
            tenant_pages.move_to_end(page)
        self._count += len(tenant_pages) - before
        while self._count > self._bound:
            heaviest = max(self._of, key=lambda name: len(self._of[name]))
            pages = self._of[heaviest]
            excess = min(self._count - self._bound, len(pages))
            for _ in range(excess):
                pages.popitem(last=False)
            self._count -= excess
            if not pages:
                del self._of[heaviest]


class Router:
    """Chooses among engines whose pages have `page_size` tokens.

    `pages` is the number of pages in each engine's prefix cache. With 0 pages, prefixes are not compared. `rows` is the
    number of sequences that an engine runs at a time.
    """

    def __init__(self, engines: int, page_size: int, pages: int, rows: int = sys.maxsize) -> None:
        self._page_size, self._rows = page_size, rows
        self._bound = min(pages, MAX_PAGES_HELD // engines)
        self._pages_of = [HeldPages(self._bound) for _ in range(engines)]

    def choose(
        self, tokens: Sequence[int], salt: str, tenant: str, loads: Mapping[int, Load], reuses: bool = True
    ) -> tuple[int, int]:
        """Return the engine for a prompt of a tenant, and the number of its tokens that have to be computed there.

        `loads` are the engines that can take it, at least one. Without `reuses`, the request ignores cached prefixes.
        """
        chain = self._chain(tokens, salt)
        max_pages = (len(tokens) - 1) // self._page_size  # the last token is always computed

        def hits(engine: int) -> int:
            return min(max_pages, self._pages_of[engine].matched(tenant, chain)) if reuses else 0

        uncached = {engine: len(tokens) - self._page_size * hits(engine) for engine in self._candidates(loads)}

        def cost(engine: int) -> tuple[int, int, int, int]:
            load = loads[engine]
            total = uncached[engine] + load.queued_tokens + OPEN_SEQUENCE_TOKENS * load.sequences
            return total, load.sequences, len(self._pages_of[engine]), engine

        chosen = min(uncached, key=cost)
        self._pages_of[chosen].add(tenant, chain)
        return chosen, uncached[chosen]

    def _candidates(self, loads: Mapping[int, Load]) -> list[int]:
        """Return the engines below their share, of these only those with free rows if there are any: elsewhere, the
        request would wait until another one ends."""
        below = below_share(loads)
        return [engine for engine in below if loads[engine].sequences < self._rows] or below

    def forget(self, engine: int) -> None:
        """Forget what the engine has cached."""
        self._pages_of[engine].clear()

    def _chain(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return the hashes of the prompt's full pages that are compared, each with those before it."""
        size = self._page_size
        count = min(len(tokens) // size, MAX_PAGES, self._bound)
        data = memoryview(array("Q", tokens[: count * size])).cast("B")
        width, page = 8 * size, hash(salt)
        return [page := hash((page, data[start : start + width].tobytes())) for start in range(0, count * width, width)]
