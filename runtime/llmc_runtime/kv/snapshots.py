"""Snapshots of the states of recurrent layers: which entry of a bounded pool holds the state after which prefix.

The state of a recurrent layer is that after a row's last token. A cached prefix can be reused only where the state at
its end was kept, so copies are taken at the ends of some pages. An entry is free, reserved (a step in flight writes it)
or kept under the digest of the page that its prefix ends with; it is freed when that page is evicted. If no entry is
free, the tenant with the most kept ones loses the one that was used least recently. A pinned entry is not evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from llmc_runtime.kv.pages import PageError


class SnapshotPool:
    """A pool of `count` entries, all free at first. An operation takes O(1) time; to choose the tenant who loses an
    entry takes O(n log n) for n tenants with entries.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._kept: dict[str, OrderedDict[bytes, int]] = {}  # by tenant: digest -> entry, least recently used first
        self._tenant: dict[bytes, str] = {}  # kept digest -> tenant
        self._pins: Counter[int] = Counter()  # by entry

    @property
    def num_used(self) -> int:
        """The number of entries that are kept or reserved."""
        return self.count - len(self._free)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._tenant

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the digests under which entries are kept."""
        return iter(self._tenant)

    def use(self, digest: bytes) -> int:
        """Return the entry that is kept under a digest, and note that it is used now."""
        entries = self._kept[self._tenant[digest]]
        entries.move_to_end(digest)
        return entries[digest]

    def reserve(self) -> int | None:
        """Reserve an entry, evicting another one if none is free. None if all are reserved or pinned."""
        if not self._free:
            self._evict()
        return self._free.pop() if self._free else None

    def keep(self, entry: int, digest: bytes, tenant: str) -> None:
        """Keep a reserved entry under a digest; it is freed if that has one already."""
        if digest in self._tenant:
            self.free(entry)
            return
        self._tenant[digest] = tenant
        self._kept.setdefault(tenant, OrderedDict())[digest] = entry

    def free(self, entry: int) -> None:
        """Free a reserved entry."""
        self._free.append(entry)

    def drop(self, digest: bytes) -> None:
        """Free the entry that is kept under a digest, if there is one. Raises PageError if it is pinned."""
        tenant = self._tenant.pop(digest, None)
        if tenant is None:
            return
        entries = self._kept[tenant]
        entry = entries.pop(digest)
        if not entries:
            del self._kept[tenant]
        if self._pins[entry]:
            raise PageError(f"snapshot {entry} is dropped while a row waits for it")
        self._free.append(entry)

    def drop_unpinned(self, digest: bytes) -> None:
        """Free the entry that is kept under a digest, unless it is pinned."""
        if not self._pins[self._kept[self._tenant[digest]][digest]]:
            self.drop(digest)

    def drop_all(self) -> None:
        """Free all entries that are kept."""
        for digest in list(self._tenant):
            self.drop(digest)

    def pin(self, entry: int) -> None:
        """Keep an entry from being evicted, until `unpin`."""
        self._pins[entry] += 1

    def unpin(self, entry: int) -> None:
        """Revert `pin`."""
        self._pins[entry] -= 1

    def content(self) -> dict[bytes, int]:
        """Return the entries that are kept, by digest; for audits."""
        return {digest: entry for entries in self._kept.values() for digest, entry in entries.items()}

    def _evict(self) -> None:
        for tenant in sorted(self._kept, key=lambda tenant: -len(self._kept[tenant])):
            for digest, entry in self._kept[tenant].items():
                if not self._pins[entry]:
                    self.drop(digest)
                    return
