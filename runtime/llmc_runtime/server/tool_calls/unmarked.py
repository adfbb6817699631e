"""Base of call formats whose marks are optional."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from llmc_runtime.grammar.lark_text import Marker, calls_without_marks, regex
from llmc_runtime.server.tool_calls.call_format import CallFormat, Steps


class Unmarked(CallFormat):
    """Calls that start a line with `bracket`, or that stand between the marks `markers[0]` and, if there is a second
    one, `markers[1]`. Only known tools are called, as other text may look the same.

    - `marks_enforced`: an enforced call has the marks. Otherwise it has none.
    - `separator`: a text that may stand between two calls.
    """

    marks_enforced: ClassVar[bool] = False
    separator: ClassVar[str] = ""

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return *super().openers(), cls.bracket

    def _is_name(self, name: str) -> bool:
        return name in self._tools

    def _closing_marks(self, opener: str) -> Steps[None]:
        yield from super()._closing_marks(opener)
        if opener != self.bracket and self.markers[1:]:
            yield from self._optional(self.markers[1])
        if self.separator and (yield from self._optional(self.separator)):
            following = yield from self._next_marker(self.markers[0], self.bracket, consume=False)
            if following is None and not self._cut:
                self._emit_content(self.separator)

    # --- grammar

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat."""
        begin, end = cls._marks(marker) if cls.marks_enforced else ("", "")
        return f"calls: {begin} after_mark {end}\n{cls.after_mark(tools, marker, max_calls)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int, known: Collection[str]) -> str:
        """See CallFormat."""
        _, end = cls._marks(marker)
        calls = [(cls._opening(regex(name)), cls._closing(rule, max_calls)) for name, rule in tools.items()]
        never = cls._openings("|".join(map(regex, known)))
        unmarked = calls_without_marks(calls, never, cls.markers[0], marker, end and f"{end}?")
        return f"{unmarked}\n{cls.after_mark(tools, marker, max_calls)}"

    @classmethod
    def _marks(cls, marker: Marker) -> tuple[str, str]:
        """Return the Lark expressions of the marks before and after calls, "" if there is none after them."""
        begin, *end = map(marker, cls.markers[:2])
        return begin, "".join(end)

    @classmethod
    @abstractmethod
    def _opening(cls, name: str) -> str:
        """Return a regular expression of a call up to its arguments; `name` matches the tool's name."""

    @classmethod
    @abstractmethod
    def _closing(cls, rule: str, max_calls: int) -> str:
        """Return a Lark expression of the arguments, matched by `rule`, the end of the call, and further calls up to
        `max_calls` altogether.
        """

    @classmethod
    @abstractmethod
    def _openings(cls, names: str) -> str:
        """Return a regular expression of all texts with which a reader could start a call; `names` matches the names of
        tools.
        """
