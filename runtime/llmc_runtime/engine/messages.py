"""What the front and the engine process say to each other: msgspec structs in msgpack, as arrays. It sends nothing.

The front sends `Add` on one socket and `Control` on another, so that an abort overtakes a queue of requests; the engine
process answers with `Report`. Request ids are numbers that the front gives, rising, each to one output of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.row_abi import TOP_LOGPROBS
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams
from llmc_runtime.sched.step import TokenLogprobs
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams
from llmc_runtime.sched.token_mask import TokenMask
from llmc_runtime.trace import Row

_ENGINE = tuple((one.name, one.default) for one in PARAMETERS.values() if one.engine)


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Arrays whose first element names the kind."""


class Fault(msgspec.Struct, array_like=True, gc=False):
    """An LlmcError on its way."""

    code: str
    cause: str
    remedy: str


class Add(_Message):
    """A request for outputs with the numbers first, first + 1, ...; `params` as `params_of` has them, `bad_words` as
    token ids."""

    first: int
    prompt: list[int]
    params: dict[str, Any]
    priority: int
    cache_salt: str
    bad_words: list[list[int]]
    tenant: str = ""


class Open(_Message):
    """The artifact and how to open it; sent once, first.

    `path` is percent-encoded, since file names are bytes; `options` as EngineOptions.message has them; `eos`: token ids
    that end a text beside the artifact's; `digest`: the artifact's as the front has read it, empty if it has not.
    """

    path: str
    options: dict[str, Any] = {}
    eos: list[int] = []
    digest: str = ""


class Abort(_Message):
    """These outputs end now; nothing more is said of them."""

    ids: list[int]


class Ask(_Message):
    """A question beside all requests, answered by a Reply of the same number: "record" the loop for so many seconds,
    or "reset_prefix_cache"."""

    number: int
    what: str
    seconds: float


class Stop(_Message):
    """Give everything back and end."""


class Progress(_Message):
    """A line about opening."""

    line: str


class Ready(_Message):
    """The engine is open, within these limits."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    vocab_size: int
    summary: str
    prefix_caching: bool = False
    stages: dict[str, float] = {}  # seconds of each part of opening


class Failed(_Message):
    """The engine did not open, or ended; the process ends with it."""

    fault: Fault


class Rows(msgspec.Struct, array_like=True, gc=False):
    """PackedLogprobs on their way: encoding and decoding them copies bytes and makes no objects."""

    width: int
    data: bytes

    def packed(self) -> PackedLogprobs:
        """The rows."""
        return PackedLogprobs(self.width, self.data)

    def __post_init__(self) -> None:
        if not 0 <= self.width <= TOP_LOGPROBS or len(self.data) % (12 + 12 * self.width):
            raise ValueError("no rows of log-probabilities")


class Delta(msgspec.Struct, array_like=True, gc=False):
    """A RequestDelta on its way."""

    id: int
    new_token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None
    logprobs: Rows | None
    num_cached: int
    fault: Fault | None
    prompt_logprobs: Rows | None
    stopped: bool
    times: tuple[float, float] | None = None


class Outputs(_Message):
    """What a step did."""

    deltas: list[Delta]


class Pulse(_Message):
    """A sign of life: seconds that the step under way has taken so far (0: none is), messages that made no sense, and
    the engine's counters and gauges."""

    age: float
    nonsense: int
    stats: dict[str, float | dict[str, int] | list[float]]


class Reply(_Message):
    """The answer to an Ask: whether it was done, and of a recording its rows."""

    number: int
    done: bool
    rows: list[Row]


Control = Open | Abort | Ask | Stop
Report = Progress | Ready | Failed | Outputs | Pulse | Reply


def fault_of(error: LlmcError) -> Fault:
    """The error as it is sent."""
    return Fault(error.code, error.cause, error.remedy)


def error_of(fault: Fault) -> LlmcError:
    """The error that was sent."""
    return LlmcError(fault.code, fault.cause, fault.remedy)


def params_of(params: SamplingParams) -> dict[str, Any]:
    """The parameters as they are sent: by name, those that the engine needs and that differ from their defaults."""
    values = {name: value for name, default in _ENGINE if (value := getattr(params, name)) != default}
    if isinstance(mask := values.get("allowed_token_ids"), TokenMask):
        values["allowed_token_ids"] = mask.mask
    form = params.structured_outputs
    if form is not None:
        flags = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
        value = form.text if form.kind in ("json", "regex", "grammar") else getattr(form, form.kind)
        values["structured_outputs"] = {form.kind: value} | {name: getattr(form, name) for name in flags}
    return values


def sampling_of(values: dict[str, Any]) -> SamplingParams:
    """The parameters that were sent, checked like any others. LlmcError E601."""
    values = dict(values)
    if isinstance(mask := values.get("allowed_token_ids"), bytes):
        values["allowed_token_ids"] = TokenMask(mask)
    if (form := values.get("structured_outputs")) is not None:
        values["structured_outputs"] = StructuredOutputsParams(**form)
    return SamplingParams(**values)


def _packed(rows: Sequence[TokenLogprobs] | None) -> Rows | None:
    if rows is None:
        return None
    if not isinstance(rows, PackedLogprobs):
        given, rows = rows, PackedLogprobs(max((len(row.top_ids) for row in rows), default=0))
        rows.extend(given)
    return Rows(rows.width, bytes(rows.data))


def sent(delta: RequestDelta) -> Delta:
    """The delta of an engine whose ids are numbers in letters."""
    fault = None if delta.error is None else fault_of(delta.error)
    return Delta(
        int(delta.id), delta.new_token_ids, delta.finish_reason, delta.stop_reason, _packed(delta.logprobs),
        delta.num_cached, fault, _packed(delta.prompt_logprobs), delta.stopped, delta.times,
    )  # fmt: skip


def received(delta: Delta) -> RequestDelta:
    """The delta as the collectors take it."""
    error = None if delta.fault is None else error_of(delta.fault)
    rows = None if delta.logprobs is None else delta.logprobs.packed()
    scores = None if delta.prompt_logprobs is None else delta.prompt_logprobs.packed()
    return RequestDelta(
        str(delta.id), delta.new_token_ids, delta.finish_reason, delta.stop_reason, rows,
        delta.num_cached, error, scores, delta.stopped, delta.times,
    )  # fmt: skip
