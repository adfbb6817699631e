"""The options of AsyncLLM: those of an engine (see engine_options), and those of its process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.option_type import in_range, option

TARGET_ITL_MS = 20.0  # default of AsyncLLM and the server


@dataclass(frozen=True)
class EngineArgs(EngineOptions):
    """The options of AsyncLLM: those of an engine, and those of its process. Raises LlmcError as EngineOptions does."""

    step_timeout: float | None = option(
        None, "time limit of a step in seconds (default: 300 on CPU targets, 30 on others)",
        check=in_range(0.1, optional=True),
    )  # fmt: skip
    start_timeout: float = option(900.0, "time limit of opening the model in seconds", check=in_range(0.1))
    max_restarts: int = option(
        3, "number of restarts of the engine process within an hour, after which AsyncLLM gives up", check=in_range(0)
    )
    restart_delay: float = option(
        0.5, "seconds before the first restart of the engine process, doubled for each further one", check=in_range(0)
    )
    max_restart_delay: float | None = option(
        None,
        "maximum interval of restarts in seconds: after max_restarts, AsyncLLM tries again at intervals that double "
        "from a second (default: it gives up)", check=in_range(0.1, optional=True),
    )  # fmt: skip

    def message(self) -> dict[str, Any]:
        """Add the default time of a step to EngineOptions.message, if neither time nor size of steps is given."""
        chosen = self
        if self.target_itl_ms is None and self.max_num_batched_tokens is None:
            chosen = replace(self, target_itl_ms=TARGET_ITL_MS)
        return super(EngineArgs, chosen).message()
