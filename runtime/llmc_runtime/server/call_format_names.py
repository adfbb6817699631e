"""The names of call formats that a flag accepts: ours, and those of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "llmc_runtime.call_formats"
OURS = (
    "auto", "hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "qwen3_xml", "seed_oss", "minimax_m2",
    "glm45", "glm47", "deepseek_v3", "deepseek_v31", "kimi_k2", "granite", "granite-20b-fc", "phi4_mini_json",
    "pythonic", "llama4_pythonic", "llama4_json", "lfm2", "granite4", "mimo", "none",
)  # fmt: skip


def entry_points_of(name: str) -> tuple[EntryPoint, ...]:
    """Return what installed packages offer under this name; () for our own names, without reading the group."""
    return () if name in OURS else tuple(entry_points(group=GROUP, name=name))


class FormatNames(tuple[str, ...]):
    """Our names, for lists. `in` also finds the names of installed packages, which are looked up only then."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and bool(entry_points_of(name)))
