"""Makes the output of a step from tuples, for simulated executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmc_runtime.sched.step import StepOutput, TokenLogprobs

Logprobs = tuple[float, int, Sequence[int], Sequence[float]]  # the fields of TokenLogprobs


def reply(
    tokens: list[int | None],
    logprobs: Sequence[Logprobs | None] | None = None,
    scores: Mapping[int, Sequence[Logprobs]] | None = None,
    accepted: Mapping[int, Sequence[tuple[int, Logprobs | None]]] | None = None,
    proposed: Sequence[int] = (),
    looked: Mapping[int, Sequence[int]] | None = None,
    likely: Mapping[int, list[float]] | None = None,
) -> StepOutput:
    """Return the output; the arguments are the fields of StepOutput. `logprobs` is None if none are requested."""
    rows = [None] * len(tokens) if logprobs is None else [*map(_packed, logprobs)]
    packed = {index: [TokenLogprobs(*values) for values in row] for index, row in (scores or {}).items()}
    runs = {index: [(token, _packed(values)) for token, values in run] for index, run in (accepted or {}).items()}
    return StepOutput(tokens, rows, packed, runs, proposed, looked=looked or {}, likely=likely or {})


def _packed(values: Logprobs | None) -> TokenLogprobs | None:
    return None if values is None else TokenLogprobs(*values)
