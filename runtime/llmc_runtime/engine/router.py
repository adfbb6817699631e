"""Router: which of several engines gets a request. It does no IO; its only input is what the front end has sent.

A request goes to the engine with the least cost: the prompt tokens that it would have to compute, those that are queued
there, and RUNNING tokens for each open sequence. Engines with more than their share of the open sequences are left out,
and so are engines whose rows are all in use while another has a free one.
What an engine has cached is estimated: the pages of the prompts that it got last.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc_runtime.kv.prefix import extend_chain, root_digest

RUNNING = 32  # cost of an open sequence, in prompt tokens
SHARE = 1.5  # an engine may have this many times the mean of open sequences, plus one
MAX_DIGESTS = 1 << 17  # remembered pages, over all engines
MAX_PAGES = 1024  # pages of a prompt that are compared; the time to hash more would delay the event loop


@dataclass(slots=True)
class Load:
    """The load that was sent to an engine: prompt tokens of requests without a first token yet, and open sequences."""

    queued_tokens: int = 0
    sequences: int = 0


def below_share(loads: Mapping[int, Load]) -> list[int]:
    """Return the engines with at most SHARE times the mean of open sequences, plus one. There is at least one."""
    limit = SHARE * sum(load.sequences for load in loads.values()) / len(loads) + 1
    return [engine for engine, load in loads.items() if load.sequences < limit]


class Router:
    """Chooses among engines whose pages have `page_size` tokens.

    `context` is that of the engines' prefix caches, and `pages` the number of pages in each. With 0 pages, prefixes are
    not compared. `rows` is the number of sequences that an engine runs at a time.
    """

    def __init__(self, engines: int, page_size: int, pages: int, context: str = "", rows: int = sys.maxsize) -> None:
        self._page_size, self._context, self._rows = page_size, context, rows
        self._bound = min(pages, MAX_DIGESTS // engines)
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(engines)]  # latest last

    def choose(
        self, tokens: Sequence[int], salt: str, loads: Mapping[int, Load], reuses: bool = True
    ) -> tuple[int, int]:
        """Return the engine for a prompt, and the number of its tokens that have to be computed there.

        `loads` are the engines that can take it, at least one. Without `reuses`, the request ignores cached prefixes.
        """
        chain = self._chain(tokens, salt)
        max_pages = (len(tokens) - 1) // self._page_size  # the last token is always computed
        uncached = {
            engine: len(tokens) - self._page_size * (min(max_pages, self._matched(engine, chain)) if reuses else 0)
            for engine in self._candidates(loads)
        }

        def cost(engine: int) -> tuple[int, int, int, int]:
            load = loads[engine]
            total = uncached[engine] + load.queued_tokens + RUNNING * load.sequences
            return total, load.sequences, len(self._held[engine]), engine

        chosen = min(uncached, key=cost)
        self._remember(chosen, chain)
        return chosen, uncached[chosen]

    def _candidates(self, loads: Mapping[int, Load]) -> list[int]:
        """Return the engines below their share, of these only those with free rows if there are any: elsewhere, the
        request would wait until another one ends."""
        below = below_share(loads)
        return [engine for engine in below if loads[engine].sequences < self._rows] or below

    def forget(self, engine: int) -> None:
        """Forget what the engine has cached."""
        self._held[engine].clear()

    def _chain(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """Return the digests of the prompt's full pages, as the prefix caches compute them."""
        if not self._bound:
            return []
        chain = [root_digest(self._context, salt)]
        extend_chain(chain, tokens, self._page_size, min(len(tokens) // self._page_size, MAX_PAGES, self._bound))
        return chain[1:]

    def _matched(self, engine: int, chain: Sequence[bytes]) -> int:
        held = self._held[engine]
        return next((index for index, digest in enumerate(chain) if digest not in held), len(chain))

    def _remember(self, engine: int, chain: Sequence[bytes]) -> None:
        """Remember pages as the latest. First pages are the last to be forgotten, since the others follow them."""
        held = self._held[engine]
        for digest in reversed(chain):
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self._bound:
            held.popitem(last=False)
