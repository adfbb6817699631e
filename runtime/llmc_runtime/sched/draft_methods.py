"""The methods that draft on the host: ours, and those that installed packages offer as entry points of GROUP."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.host_draft import Draft
from llmc_runtime.sched.suffix_draft import SuffixDraft

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llmc_runtime.drafts"
OURS: Mapping[str, type[Draft]] = MappingProxyType({"suffix": SuffixDraft})


def offered(name: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of methods that installed packages offer under this name."""
    from importlib.metadata import entry_points  # takes a hundredth of a second, and few need it

    return tuple(entry_points(group=GROUP, name=name))


def open_draft(name: str) -> Draft:
    """Return a new Draft of the method with this name, ours or that of an installed package.

    Raises LlmcError E206 if no package or more than one offers it, or if it cannot be loaded or made.
    """
    if name in OURS:
        return OURS[name]()
    entries = offered(name)
    cause = "" if len(entries) == 1 else f"{len(entries)} packages offer it"
    if not cause:
        try:
            kind = entries[0].load()
            if isinstance(kind, type) and issubclass(kind, Draft):
                return kind()
            cause = f"{entries[0].value} is not a Draft"
        except Exception as error:
            cause = f"{entries[0].value} failed: {type(error).__name__}: {error}"
    raise LlmcError("E206", f"speculate = {name[:60]!r}: {cause}", "install, uninstall or correct the package")
