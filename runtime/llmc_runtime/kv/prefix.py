"""The prefix cache: finds the pages that hold a known prefix, by a hash chain over full pages.

The digest of a page is the SHA-256 of its parent's digest and its own tokens. The first parent is the SHA-256 of
everything else that KV depends on (the artifact, the KV dtype, the request's salt). The scheme follows vLLM's automatic
prefix caching. On a hit the tokens are also compared, so that a hash collision cannot expose foreign KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from llmc_runtime.kv.pages import PageError, PagePool


class PrefixCache:
    """The cached pages of a pool. `context` is what KV depends on besides tokens and salt (the artifact)."""

    def __init__(self, pool: PagePool, page_size: int, context: str = "", enabled: bool = True) -> None:
        self.pool, self.page_size, self.enabled = pool, page_size, enabled
        self._context = context
        self._page: dict[bytes, int] = {}  # digest -> the page that holds it
        self._content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # page -> its digest and tokens
        self.forgotten: Callable[[bytes], None] | None = None  # called with the digest of a page that is evicted
        pool.forget = self._forget

    def __len__(self) -> int:
        return len(self._page)

    def root(self, salt: str = "") -> bytes:
        """Return the parent digest of first pages. Prefixes are shared only between requests with equal salts."""
        parts = (self._context.encode(), salt.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()

    def extend(self, chain: list[bytes], tokens: Sequence[int], upto: int) -> None:
        """Extend `chain` (the root, then one digest per page) to the first `upto` pages of `tokens`."""
        size = self.page_size
        for page in range(len(chain) - 1, upto):
            page_tokens = array("Q", tokens[page * size : (page + 1) * size]).tobytes()
            chain.append(hashlib.sha256(chain[page] + page_tokens).digest())

    def match(self, chain: list[bytes], tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix of `tokens`, without taking references.

        At most len(tokens) - 1 tokens are covered, as the last one must be computed for its logits. `chain` is extended
        as needed.
        """
        size = self.page_size
        pages: list[int] = []
        if not self.enabled:
            return pages
        for index in range((len(tokens) - 1) // size):  # full pages without the last token
            if len(chain) - 1 <= index:
                self.extend(chain, tokens, index + 1)
            page = self._page.get(chain[index + 1])
            if page is None or self._content[page][1] != tuple(tokens[index * size : (index + 1) * size]):
                break
            pages.append(page)
        return pages

    def publish(
        self, chain: list[bytes], tokens: Sequence[int], pages: Sequence[int], start: int, stop: int, tenant: str = ""
    ) -> None:
        """Add the pages `start` to `stop` of a table of `tenant` to the cache. They must be full and computed.

        If another page already caches the same prefix, that page stays, and this table's copy remains private.
        """
        if not self.enabled:
            return
        size = self.page_size
        self.extend(chain, tokens, stop)
        for index in range(start, stop):
            digest, page = chain[index + 1], pages[index]
            if digest not in self._page and page not in self._content:
                self.pool.mark_cached(page, tenant)
                self._page[digest] = page
                self._content[page] = (digest, tuple(tokens[index * size : (index + 1) * size]))

    def reset(self) -> None:
        """Empty the cache. Raises PageError if a page is in use, as its table may still be shared."""
        self.pool.drop_all()
        self._page.clear()
        self._content.clear()

    def _forget(self, page: int) -> None:
        digest, _ = self._content.pop(page)
        if self._page.pop(digest) != page:
            raise PageError(f"page {page} held a prefix that was published elsewhere")
        if self.forgotten is not None:
            self.forgotten(digest)

    def content(self) -> dict[int, tuple[bytes, tuple[int, ...]]]:
        """Return a copy of the cache's content, page -> (digest, tokens); for audits."""
        return dict(self._content)
