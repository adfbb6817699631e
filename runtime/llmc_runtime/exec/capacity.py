"""How many KV pages a byte budget buys, and how to say so; arithmetic on the manifest alone."""

from __future__ import annotations

from dataclasses import dataclass

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import Manifest

# Of the memory that is free at load, the part that the KV cache takes when nobody says otherwise.
SHARE = 0.5


@dataclass(frozen=True)
class KvCapacity:
    """The pool: `pages` of `page_size` tokens and `bytes_per_page` over all layers; sequences up to `max_model_len`."""

    pages: int
    page_size: int
    bytes_per_page: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def nbytes(self) -> int:
        return self.pages * self.bytes_per_page

    def __str__(self) -> str:
        whole = f"{self.tokens} tokens in {self.pages} pages of {self.page_size} ({human(self.nbytes)})"
        return f"KV cache: {whole}, {self.tokens / self.max_model_len:.1f} sequences of {self.max_model_len}"


def plan_kv(manifest: Manifest, kv_bytes: int | None, free: int) -> KvCapacity:
    """The pool for `kv_bytes`; None: what every row at full length can use, at most half of the `free` bytes.

    Raises LlmcError E202 where not even one page fits.
    """
    kv, limits = manifest.kv, manifest.limits
    useful = limits.max_num_seqs * -(-limits.max_model_len // kv.page_size)
    budget = int(free * SHARE) if kv_bytes is None else kv_bytes
    pages = min(useful, budget // kv.bytes_per_page) if kv.bytes_per_page else useful
    if pages < 1:
        cause = f"the KV cache has {human(budget)}; a page of {kv.page_size} tokens takes {human(kv.bytes_per_page)}"
        whole = -(-limits.max_model_len // kv.page_size) * kv.bytes_per_page
        raise LlmcError(
            "E202", cause, f"give at least {human(whole)}, which holds one sequence of {limits.max_model_len}"
        )
    return KvCapacity(pages, kv.page_size, kv.bytes_per_page, limits.max_model_len)


def human(nbytes: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
