"""EngineArgs: what AsyncLLM is opened with, under the names that LLM uses; it opens nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError


@dataclass(frozen=True)
class EngineArgs:
    """The first part is LLM's (see there). LlmcError E201 where a limit of the second part makes no sense.

    heartbeat_timeout  seconds without a sign of life after which the engine process counts as hung (five times as many
                       while it only waits for a processor)
    step_timeout       seconds that one step may take (None: 300 on a CPU target, 30 on others)
    start_timeout      seconds that opening may take
    max_restarts       engine processes that are replaced within an hour; at the next one AsyncLLM gives up
    restart_delay      seconds before the first of these; doubled for each one after
    max_restart_delay  with this, AsyncLLM never gives up: after max_restarts it keeps trying, at intervals that double
                       from a second up to so many seconds
    """

    model: str | Path
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    threads: int | None = None
    seed: int | None = 0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    chat_template: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    target: str = "cpu:native"
    dtype: str = "auto"
    cache_dir: str | Path | None = None
    verify: bool = True
    canary: bool = False
    prepare: bool = False
    trace: str | Path | None = None

    heartbeat_timeout: float = 0.8
    step_timeout: float | None = None
    start_timeout: float = 900.0
    max_restarts: int = 3
    restart_delay: float = 0.5
    max_restart_delay: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_timeout", "step_timeout", "start_timeout", "restart_delay", "max_restarts", "max_restart_delay",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("step_timeout", "max_restart_delay"):
                continue
            least = 0 if name in ("max_restarts", "restart_delay") else 0.1
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= 1e6:
                cause = f"{name} = {value!r:.60} is not possible"
                raise LlmcError("E201", cause, f"give {name} a number of {least} or more, up to 1000000")

    @property
    def compile_options(self) -> dict[str, str]:
        """What a compile is told where `model` is a Hugging Face folder."""
        sizes = {
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
        }
        return {"target": self.target, "dtype": self.dtype} | {k: str(v) for k, v in sizes.items() if v is not None}
