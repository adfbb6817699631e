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
from llmc_runtime.kv.prefix_match import PrefixMatch

_HASHED_PAGES = 64  # pages of which a search computes digests at a time
MAX_MATCHES = 8  # requests that wait, one for each tenant, whose cached pages are kept track of


class PrefixCache:
    """The cached pages of a pool. `context` is what KV depends on besides tokens and salt (the artifact)."""

    def __init__(self, pool: PagePool, page_size: int, context: str = "", enabled: bool = True) -> None:
        self.pool, self.page_size, self.enabled = pool, page_size, enabled
        self._context = context
        self._page: dict[bytes, int] = {}  # digest -> the page that holds it
        # By page: its digest, and its tokens, 4 bytes each. The garbage collector does not visit such dictionaries.
        self._digest: dict[int, bytes] = {}
        self._tokens: dict[int, bytes] = {}
        self._matches: list[PrefixMatch] = []  # kept up to date, the last one that was requested at the end
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
        start = len(chain) - 1
        chain_digest = chain[-1]
        for page_tokens in self._pages_of(tokens, start, upto):
            chain_digest = hashlib.sha256(chain_digest + page_tokens).digest()
            chain.append(chain_digest)

    def match(self, chain: list[bytes], tokens: Sequence[int], length: int | None = None) -> PrefixMatch:
        """Return the pages of the longest cached prefix of the first `length` tokens, by default all, without taking
        references. `chain` belongs to this sequence only, and is extended as needed.

        At most length - 1 tokens are covered, as the last one must be computed for its logits. The last MAX_MATCHES
        results are kept up to date, so a request that waits is not matched again in each step.
        """
        max_pages = ((len(tokens) if length is None else length) - 1) // self.page_size if self.enabled else 0
        match = next((m for m in self._matches if m.chain is chain and m.max_pages == max_pages), None)
        if match is None:
            match = PrefixMatch(chain, max_pages)
        else:
            self._matches.remove(match)
        self._matches.append(match)
        del self._matches[:-MAX_MATCHES]
        self._grow(match, tokens)
        return match

    def end_match(self, match: PrefixMatch) -> None:
        """Stop keeping a match up to date, whose request no longer waits."""
        self._matches.remove(match)

    def publish(
        self, chain: list[bytes], tokens: Sequence[int], pages: Sequence[int], start: int, stop: int, tenant: str = ""
    ) -> None:
        """Add the pages `start` to `stop` of a table of `tenant` to the cache. They must be full and computed.

        If another page already caches the same prefix, that page stays, and this table's copy remains private.
        """
        if not self.enabled:
            return
        self.extend(chain, tokens, stop)
        for index, page_tokens in zip(range(start, stop), self._pages_of(tokens, start, stop)):
            digest, page = chain[index + 1], pages[index]
            if digest not in self._page and page not in self._digest:
                self.pool.mark_cached(page, tenant)
                self._page[digest] = page
                self._digest[page], self._tokens[page] = digest, page_tokens

    def reset(self) -> None:
        """Empty the cache. Raises PageError if a page is in use, as its table may still be shared."""
        self.pool.drop_all()
        self._page.clear()
        self._digest.clear()
        self._tokens.clear()
        self._matches.clear()

    def _forget(self, page: int) -> None:
        """Remove a page that is about to be reused from the cache."""
        digest = self._digest.pop(page)
        del self._tokens[page]
        if self._page.pop(digest) != page:
            raise PageError(f"page {page} held a prefix that was published elsewhere")
        for match in self._matches:
            match.forget(digest)
        if self.forgotten is not None:
            self.forgotten(digest)

    def _grow(self, match: PrefixMatch, tokens: Sequence[int]) -> None:
        """Add the pages to a match that were published since it was made."""
        chain, start = match.chain, len(match.pages)
        pages: list[int] = []
        for index in range(start, match.max_pages):
            if len(chain) - 1 <= index:
                self.extend(chain, tokens, min(index + _HASHED_PAGES, match.max_pages))
            page = self._page.get(chain[index + 1])
            if page is None:
                break
            pages.append(page)
        wanted = self._pages_of(tokens, start, start + len(pages))
        if (cached := [self._tokens[page] for page in pages]) != wanted:
            del pages[next(i for i, tokens_of_page in enumerate(cached) if tokens_of_page != wanted[i]) :]
        match.extend(pages)

    def _pages_of(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Return the tokens of the pages `start` to `stop`, 4 bytes each."""
        size = self.page_size
        data, step = array("I", tokens[start * size : stop * size]).tobytes(), 4 * size
        return [data[at : at + step] for at in range(0, len(data), step)]

    def content(self) -> dict[int, tuple[bytes, tuple[int, ...]]]:
        """Return the cache's content, page -> (digest, tokens); for audits."""
        return {page: (digest, tuple(array("I", self._tokens[page]))) for page, digest in self._digest.items()}
