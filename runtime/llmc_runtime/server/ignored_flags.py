"""vLLM's flags that have no meaning here, as flags of llmc-serve: see `llmc_runtime.ignored_options`."""

from __future__ import annotations

import argparse
from typing import Any

from llmc_runtime.ignored_options import by_flag


class _Collect(argparse.Action):
    """Appends (flag, values) to `ignored_flags`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        texts = [values] if isinstance(values, str) else list(values or [])
        flag = option or self.option_strings[0]
        namespace.ignored_flags = [*(namespace.ignored_flags or []), (flag, texts)]


def add_ignored(parser: argparse.ArgumentParser) -> None:
    """Add the flags, hidden from the help."""
    nargs: dict[str, int | str | None] = {"": 0, "1": None}
    for flag, row in by_flag().items():
        parser.add_argument(
            flag, action=_Collect, dest="ignored_flags", nargs=nargs.get(row.values, row.values), default=[],
            help=argparse.SUPPRESS,
        )  # fmt: skip
