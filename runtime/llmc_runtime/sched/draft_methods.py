"""The methods that draft on the host: ours, and those that installed packages offer as entry points of GROUP.

Ours are "module:class" texts, imported when they are opened: options are checked against the names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc_runtime.format.entry_point import offered_class, offers
from llmc_runtime.format.errors import LlmcError

if TYPE_CHECKING:
    from llmc_runtime.sched.host_draft import Draft

GROUP = "llmc_runtime.drafts"
OURS: Mapping[str, str] = MappingProxyType({"suffix": "llmc_runtime.sched.suffix_draft:SuffixDraft"})


def is_offered(name: str) -> bool:
    """Return whether an installed package offers a method under this name."""
    return offers(GROUP, name)


def open_draft(name: str) -> Draft:
    """Return a new Draft of the method with this name, ours or that of an installed package.

    Raises LlmcError E206 if no package or more than one offers it, or if it cannot be loaded or made.
    """
    if name in OURS:
        module, _, attribute = OURS[name].partition(":")
        draft: Draft = getattr(import_module(module), attribute)()
        return draft
    from llmc_runtime.sched.host_draft import Draft

    kind, cause = offered_class(GROUP, name, Draft)  # type: ignore[type-abstract]
    if kind is not None:
        try:
            return kind()
        except Exception as error:
            cause = f"{kind.__name__} failed: {type(error).__name__}: {error}"
    raise LlmcError("E206", f"speculate = {name[:60]!r}: {cause}", "install, uninstall or correct the package")
