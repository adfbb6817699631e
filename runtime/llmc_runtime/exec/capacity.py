"""Computes how many KV pages and snapshots of recurrent layers' states fit into memory, from the manifest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.size_text import size_text

SNAPSHOTS_PER_ROW = 2  # default number of snapshots per device row
_SNAPSHOT_SHARE = 4  # by default, snapshots take at most 1 / _SNAPSHOT_SHARE of the KV cache's memory


@dataclass(frozen=True)
class KvCapacity:
    """The size of the KV cache: `pages` of `page_size` tokens, and `bytes_per_page` summed over all layers; and the
    number of snapshots of recurrent layers' states, of `bytes_per_snapshot` each.
    """

    pages: int
    page_size: int
    bytes_per_page: int
    max_model_len: int
    snapshots: int = 0
    bytes_per_snapshot: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that the cache can hold."""
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        """The size of the cache in bytes."""
        return self.pages * self.bytes_per_page

    @property
    def snapshot_bytes(self) -> int:
        """The size of all snapshots in bytes."""
        return self.snapshots * self.bytes_per_snapshot

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-tokens // self.page_size)

    def __str__(self) -> str:
        size = f"{self.tokens} tokens in {self.pages} pages of {self.page_size} ({size_text(self.nbytes)})"
        text = f"KV cache: {size}, {self.tokens / self.max_model_len:.1f} sequences of {self.max_model_len}"
        if self.snapshots:
            text += f", {self.snapshots} state snapshots ({size_text(self.snapshot_bytes)})"
        return text


@dataclass(frozen=True)
class Need:
    """The memory in bytes that an artifact needs on a device with its own memory, besides the KV cache."""

    weights: int
    states: int
    arena: int
    snapshots: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return self.weights + self.states + self.arena + self.snapshots

    def __str__(self) -> str:
        parts = {"weights": self.weights, "rows": self.states, "intermediate results": self.arena}
        if self.snapshots:
            parts["state snapshots"] = self.snapshots
        return ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())


NOTHING = Need(0, 0, 0)


def plan_kv(
    manifest: Manifest, kv_bytes: int | None, free: int, share: float, need: Need, snapshots: int | None = 0
) -> KvCapacity:
    """Compute the size of the KV cache, and the number of snapshots of recurrent layers' states.

    kv_bytes:   budget of the cache in bytes; None: what all rows of maximum length can use, limited to the fraction
                `share` of the remaining memory
    free:       free memory in bytes before anything is allocated, from which `need` and the snapshots are subtracted
    need:       the artifact's other memory; NOTHING if the device shares the host's memory, which is not checked
    snapshots:  number of snapshots; None: SNAPSHOTS_PER_ROW for each row, if these fit

    Raises LlmcError E202 if not even one page fits, and E205 if the device has too little memory.
    """
    kv, limits, snapshot_bytes = manifest.kv, manifest.limits, manifest.bytes_per_snapshot
    pages_per_sequence = -(-limits.max_model_len // kv.page_size)
    sequence_bytes = pages_per_sequence * kv.bytes_per_page
    has_own_memory = need.total > 0
    num_snapshots = _num_snapshots(manifest, snapshots, free - need.total, share, kv_bytes)
    need = replace(need, snapshots=num_snapshots * snapshot_bytes)
    available = free - need.total
    budget = max(0, int(available * share)) if kv_bytes is None else kv_bytes
    pages = limits.max_num_seqs * pages_per_sequence  # more would never be used
    if kv.bytes_per_page:
        pages = min(pages, budget // kv.bytes_per_page)
    if has_own_memory and (available < 0 or (pages < 1 and kv_bytes is None)):
        raise _too_little(need, free, sequence_bytes, limits.max_model_len)
    if pages < 1:
        page = f"a page of {kv.page_size} tokens takes {size_text(kv.bytes_per_page)}"
        remedy = f"set at least {size_text(sequence_bytes)}, enough for one sequence of {limits.max_model_len} tokens"
        raise LlmcError("E202", f"the KV cache has {size_text(budget)}; {page}", remedy)
    if has_own_memory and pages * kv.bytes_per_page > available:
        remaining = f"{size_text(available)} of {size_text(free)} are left after {need}"
        tokens = available // kv.bytes_per_page * kv.page_size
        remedy = f"set at most {size_text(available)}, enough for {tokens} tokens"
        raise LlmcError("E205", f"the KV cache needs {size_text(budget)}; {remaining}", remedy)
    return KvCapacity(pages, kv.page_size, kv.bytes_per_page, limits.max_model_len, num_snapshots, snapshot_bytes)


def _num_snapshots(
    manifest: Manifest, requested: int | None, available: int, share: float, kv_bytes: int | None
) -> int:
    """Return the number of snapshots, `requested` or the default, for `available` bytes.

    Raises LlmcError E205 if the requested ones do not fit.
    """
    snapshot_bytes, limit = manifest.bytes_per_snapshot, int(max(0, available) * share)
    if not snapshot_bytes:
        return 0
    if requested is None:
        room = limit // _SNAPSHOT_SHARE
        if kv_bytes is not None:
            room = min(room, available - kv_bytes)
        return min(SNAPSHOTS_PER_ROW * manifest.limits.max_num_seqs, max(0, room) // snapshot_bytes)
    if requested * snapshot_bytes > limit:
        needed = size_text(requested * snapshot_bytes)
        cause = f"{requested} state snapshots need {needed}; {size_text(limit)} are left for them and the KV cache"
        raise LlmcError("E205", cause, f"set --state-snapshots to less than {limit // snapshot_bytes}")
    return requested


def _too_little(need: Need, free: int, sequence_bytes: int, length: int) -> LlmcError:
    """Return the error for a device without memory for one sequence of `length` tokens."""
    sequence = f"KV of one sequence of {length} tokens {size_text(sequence_bytes)}"
    needed = f"{size_text(need.total + sequence_bytes)} are needed: {need}, {sequence}"
    cause = f"the device has {size_text(free)} free; {needed}"
    if need.weights < free:
        remedy = "compile with smaller --max-num-seqs, --max-num-batched-tokens or --max-model-len"
    else:
        remedy = f"compile a model or a dtype whose weights take less than {size_text(free)}"
    return LlmcError("E205", cause, f"stop other programs on the device, use one with more memory, or {remedy}")
