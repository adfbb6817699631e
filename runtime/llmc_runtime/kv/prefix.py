"""Which pages hold which prefix: a hash chain of full pages. It knows no requests and computes no KV.

The digest of a page is sha256 over its parent's digest and its own tokens; the first parent is sha256 over everything
else that KV depends on (the artifact, the KV dtype, the request's salt). The scheme follows vLLM's automatic prefix
caching; on a hit the tokens are compared as well, so that a chosen collision cannot hand out foreign KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from llmc_runtime.kv.pages import PageError, PagePool


class PrefixCache:
    """The published pages of a pool. `context`: what KV depends on besides tokens and salt (the artifact)."""

    def __init__(self, pool: PagePool, page_size: int, context: str = "", enabled: bool = True) -> None:
        self.pool, self.page_size, self.enabled = pool, page_size, enabled
        self._context = context.encode()
        self._page: dict[bytes, int] = {}  # digest -> the page that holds it
        self._content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # page -> its digest and tokens
        pool.forget = self._forget

    def __len__(self) -> int:
        return len(self._page)

    def root(self, salt: str = "") -> bytes:
        """The parent of every first page. Equal prefixes share pages only within one salt."""
        parts = (self._context, salt.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()

    def extend(self, chain: list[bytes], tokens: Sequence[int], upto: int) -> None:
        """Lengthen `chain` (the root, then one digest a page) to the digests of the first `upto` pages of `tokens`."""
        size = self.page_size
        for page in range(len(chain) - 1, upto):
            own = array("Q", tokens[page * size : (page + 1) * size]).tobytes()
            chain.append(hashlib.sha256(chain[page] + own).digest())

    def match(self, chain: list[bytes], tokens: Sequence[int]) -> list[int]:
        """The pages that hold the longest published prefix of `tokens`; no reference is taken.

        At most len(tokens) - 1 tokens are covered: one is computed, for its logits. `chain` is extended as needed.
        """
        size = self.page_size
        found: list[int] = []
        if not self.enabled:
            return found
        for index in range((len(tokens) - 1) // size):
            if len(chain) - 1 <= index:
                self.extend(chain, tokens, index + 1)
            page = self._page.get(chain[index + 1])
            if page is None or self._content[page][1] != tuple(tokens[index * size : (index + 1) * size]):
                break
            found.append(page)
        return found

    def publish(self, chain: list[bytes], tokens: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Pages `start` to `stop` of a table are full and computed: others may share them from now on.

        A prefix that another page holds already stays there; this table keeps its own copy, unpublished.
        """
        if not self.enabled:
            return
        size = self.page_size
        self.extend(chain, tokens, stop)
        for index in range(start, stop):
            digest, page = chain[index + 1], pages[index]
            if digest not in self._page and page not in self._content:
                self.pool.keep(page)
                self._page[digest] = page
                self._content[page] = (digest, tuple(tokens[index * size : (index + 1) * size]))

    def reset(self) -> None:
        """Forget every prefix. PageError while a page is in use: its table may still be shared."""
        self.pool.drop_all()
        self._page.clear()
        self._content.clear()

    def _forget(self, page: int) -> None:
        digest, _ = self._content.pop(page)
        if self._page.pop(digest) != page:
            raise PageError(f"page {page} held a prefix that was published elsewhere")

    def held(self) -> dict[int, tuple[bytes, tuple[int, ...]]]:
        """A copy of what is published, page -> (digest, tokens); for audits."""
        return dict(self._content)
