"""Plain counters of one engine, under vLLM's names. No clock, no labels, no exporter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Counters:
    """They only grow; who exports them adds the `_total`. Tokens are tokens, the others events."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0  # computed on the device, recomputation included
    prompt_tokens: int = 0  # of requests admitted for the first time
    prompt_tokens_cached: int = 0  # of these, found in the prefix cache
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up, at every admission
    prefix_cache_hits: int = 0  # tokens found
    request_success: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )  # requests that ended, by reason

    def as_dict(self) -> dict[str, object]:
        """A copy, name -> number or, by reason, name -> {reason: number}."""
        return asdict(self)
