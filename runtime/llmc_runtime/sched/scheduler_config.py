"""SchedulerConfig: the limits of the model, the KV cache and a step, and the scheduling policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.sched.request import Request

if TYPE_CHECKING:
    from llmc_runtime.sched.speculation_config import SpeculationConfig

# A policy returns a request's order in queues: smaller runs first, then earlier arrival.
POLICIES: Mapping[str, Callable[[Request], int]] = MappingProxyType(
    {"fcfs": lambda request: 0, "priority": lambda request: request.priority}
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler. Raises LlmcError E201 for values that are not allowed.

    num_pages, page_size:    pages of the KV cache, and tokens in a page
    max_model_len:           maximum length of a sequence, in tokens
    max_num_seqs:            number of device rows
    max_num_batched_tokens:  maximum number of tokens in a step
    target_itl:              seconds that a step should take in which some requests decode and others compute their
                             prompts, see StepBudget; 0: such steps are as long as max_num_batched_tokens allows
    watermark:               share of the pages that admission leaves free while other requests run
    long_prefill_threshold:  maximum number of tokens of one request in a step; 0 for no limit
    context:                 the artifact's digest, part of the prefix cache's keys
    speculation:             how tokens are drafted; None: they are not
    max_num_logits:          maximum number of rows of logits in a step; 0: max_num_seqs
    max_masks:               number of masks that a device row has room for
    snapshots:               number of snapshots of the states of recurrent layers; None: the model has no such layers
    pooling:                 of a model that pools: requests end with their prompts, which may be as long as
                             max_model_len; None: it generates
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "fcfs"
    watermark: float = 0.01
    prefix_caching: bool = True
    long_prefill_threshold: int = 0
    context: str = ""
    speculation: SpeculationConfig | None = None
    max_num_logits: int = 0
    max_masks: int = 1
    pooling: Pooling | None = None
    target_itl: float = 0.0
    snapshots: int | None = None

    def __post_init__(self) -> None:
        sizes = "num_pages", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "vocab_size"
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise LlmcError("E201", f"{name} = {value!r} is not allowed", f"set {name} to at least 1")
        if self.policy not in POLICIES:
            raise LlmcError("E201", f"unknown scheduling policy {self.policy!r}", f"use one of {', '.join(POLICIES)}")
        if not 0 <= self.watermark < 1 or self.long_prefill_threshold < 0:
            cause = f"watermark = {self.watermark}, long_prefill_threshold = {self.long_prefill_threshold}"
            raise LlmcError("E201", cause, "watermark is from 0 to below 1, long_prefill_threshold 0 or more")
        if self.whole_prompts and self.max_num_batched_tokens < self.max_model_len:
            cause = f"a prompt runs in one step, and max_num_batched_tokens = {self.max_num_batched_tokens}"
            raise LlmcError("E204", cause, f"set it to at least max_model_len = {self.max_model_len}, or lower that")

    @property
    def pool_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_pages * self.page_size

    @property
    def reuses_prefixes(self) -> bool:
        """Whether the KV cache of common prefixes is reused."""
        return self.prefix_caching and self.snapshots != 0

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt runs in a single step, without cached prefixes."""
        return self.pooling is not None and self.pooling.whole

    @property
    def logits(self) -> int:
        """Maximum number of rows of logits in a step."""
        return max(self.max_num_seqs, self.max_num_logits)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-tokens // self.page_size)
