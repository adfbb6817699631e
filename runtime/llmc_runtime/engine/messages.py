"""The messages between the front end and the engine process: msgspec structs, encoded as arrays in msgpack.

The front end is the process of AsyncLLM, such as the server. It sends `Add` on one socket and `Control` on another, so
that an abort overtakes a queue of requests. The engine process answers with `Report`. The sockets are in a folder of
their own. Each output of a request has a number, assigned by the front end in ascending order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.row_abi import TOP_LOGPROBS
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import TokenLogprobs
from llmc_runtime.sched.structured_outputs import JSON_OPTIONS, StructuredOutputsParams
from llmc_runtime.sched.token_guide import TokenMask
from llmc_runtime.trace import Row

ADDS, CONTROL, REPORTS = "adds", "control", "reports"  # names of the sockets in their folder
_ENGINE = tuple((parameter.name, parameter.default) for parameter in PARAMETERS.values() if parameter.engine)


class _Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message whose first element is the name of its class."""


class ErrorMessage(msgspec.Struct, array_like=True, gc=False):
    """An LlmcError."""

    code: str
    cause: str
    remedy: str
    param: str = ""


class Add(_Message):
    """An EngineRequest. `prompt` has its ids in 4 bytes each, and `params` is as by `params_message`."""

    first: int
    prompt: bytes
    params: dict[str, Any]
    priority: int
    cache_salt: str
    bad_words: list[list[int]]
    tenant: str = ""


class Open(_Message):
    """Open an artifact. Sent once, as the first message.

    path:     percent-encoded, since file names are bytes
    options:  as by EngineOptions.message
    eos:      token ids that end a text, besides those of the artifact; None: the message Eos has them, which follows
    digest:   the digest of the artifact that the front end has read; empty if it has read none
    engine:   the number of this engine, if there are several
    """

    path: str
    options: dict[str, Any] = {}
    eos: list[int] | None = []
    digest: str = ""
    engine: int = 0


class Eos(_Message):
    """The token ids of `Open.eos`, from a front end that loads the tokenizer while the engine opens."""

    token_ids: list[int]


class Abort(_Message):
    """End these outputs. No deltas of them follow."""

    ids: list[int]


class ControlRequest(_Message):
    """A control RPC, answered by the ControlReply with the same number. `method` is "record" (record the loop for
    `seconds`) or "reset_prefix_cache"."""

    number: int
    method: str
    seconds: float


class Stop(_Message):
    """Close everything and exit."""


class Progress(_Message):
    """A log line about opening."""

    line: str


class Ready(_Message):
    """The engine is open, with these limits (see SchedulerConfig)."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    vocab_size: int
    summary: str
    prefix_caching: bool = False
    snapshots: int | None = None
    stages: dict[str, float] = {}  # seconds of each part of opening
    threads: int = 0  # compute threads on the CPU; 0 on other devices


LIMITS = tuple(name for name in Ready.__struct_fields__ if name in SchedulerConfig.__dataclass_fields__)


class Failed(_Message):
    """The engine did not open, or ended. The process exits."""

    error: ErrorMessage


class Rows(msgspec.Struct, array_like=True, gc=False):
    """PackedLogprobs. Encoding and decoding them copies bytes and creates no objects."""

    width: int
    data: bytes

    def packed(self) -> PackedLogprobs:
        """Return the rows."""
        return PackedLogprobs(self.width, self.data)

    def __post_init__(self) -> None:
        if not 0 <= self.width <= TOP_LOGPROBS or len(self.data) % (12 + 12 * self.width):
            raise ValueError(f"{len(self.data)} bytes are not rows of log-probabilities of width {self.width}")


class Delta(msgspec.Struct, array_like=True, gc=False):
    """A RequestDelta."""

    id: int
    new_token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None
    logprobs: Rows | None
    num_cached: int
    error: ErrorMessage | None
    prompt_logprobs: Rows | None
    stopped: bool
    times: tuple[float, float] | None = None
    pooled: bytes | None = None


class Outputs(_Message):
    """The deltas of a step."""

    deltas: list[Delta]


class Heartbeat(_Message):
    """Sent at regular intervals: seconds that the current step has taken so far (0: none runs), the number of invalid
    messages received, and the engine's counters and gauges."""

    age: float
    invalid_messages: int
    stats: dict[str, float | dict[str, int] | list[float]]


class ControlReply(_Message):
    """The answer to a ControlRequest: whether it was done, and the rows of a recording."""

    number: int
    done: bool
    rows: list[Row]


Control = Open | Eos | Abort | ControlRequest | Stop
Report = Progress | Ready | Failed | Outputs | Heartbeat | ControlReply


def error_message(error: LlmcError) -> ErrorMessage:
    """Return the error as it is sent."""
    return ErrorMessage(error.code, error.cause, error.remedy, error.param)


def error_of(message: ErrorMessage) -> LlmcError:
    """Return the error that was sent."""
    return LlmcError(message.code, message.cause, message.remedy, message.param)


def add_message(request: EngineRequest) -> Add:
    """Return the request as it is sent."""
    prompt, params = array("I", request.prompt.ids).tobytes(), params_message(request.params)
    return Add(request.first, prompt, params, request.priority, request.cache_salt, request.bad_words, request.tenant)


def request_of(add: Add) -> EngineRequest:
    """Return the request that was sent. Raises LlmcError E601 for parameters that are not allowed."""
    prompt, params = Prompt(array("I", add.prompt)), params_of(add.params)
    return EngineRequest(add.first, prompt, params, add.priority, add.cache_salt, add.bad_words, add.tenant)


def params_message(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as they are sent: by name, those that the engine needs and that are not the default."""
    values = {name: value for name, default in _ENGINE if (value := getattr(params, name)) != default}
    if isinstance(mask := values.get("allowed_token_ids"), TokenMask):
        values["allowed_token_ids"] = mask.mask
    form = params.structured_outputs
    if form is not None:
        value = form.text if form.kind in ("json", "regex", "grammar") else getattr(form, form.kind)
        values["structured_outputs"] = {form.kind: value} | {name: getattr(form, name) for name in JSON_OPTIONS}
    return values


def params_of(values: dict[str, Any]) -> SamplingParams:
    """Return the parameters that were sent, checked like any others. Raises LlmcError E601."""
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
        packed = PackedLogprobs(max((len(row.top_ids) for row in rows), default=0))
        packed.extend(rows)
        rows = packed
    return Rows(rows.width, bytes(rows.data))


def delta_message(delta: RequestDelta) -> Delta:
    """Return the delta as it is sent. Its id is a decimal number."""
    error = None if delta.error is None else error_message(delta.error)
    return Delta(
        int(delta.id), delta.new_token_ids, delta.finish_reason, delta.stop_reason, _packed(delta.logprobs),
        delta.num_cached, error, _packed(delta.prompt_logprobs), delta.stopped, delta.times, delta.pooled,
    )  # fmt: skip


def delta_of(delta: Delta) -> RequestDelta:
    """Return the delta that was sent."""
    error = None if delta.error is None else error_of(delta.error)
    rows = None if delta.logprobs is None else delta.logprobs.packed()
    scores = None if delta.prompt_logprobs is None else delta.prompt_logprobs.packed()
    return RequestDelta(
        str(delta.id), delta.new_token_ids, delta.finish_reason, delta.stop_reason, rows,
        delta.num_cached, error, scores, delta.stopped, delta.times, delta.pooled,
    )  # fmt: skip


def open_socket(context: zmq.Context[Any], kind: int, folder: Path, name: str, *, binds: bool, linger: int) -> Any:
    """Return a socket of this kind (zmq.PUSH or zmq.PULL), bound or connected to `name` in the folder.

    `linger` is the number of milliseconds for which closing waits until messages are sent. There are no high-water
    marks: the number of open requests bounds what a socket can hold. Raises zmq.ZMQError.
    """
    socket = context.socket(kind)
    socket.set(zmq.LINGER, linger)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    (socket.bind if binds else socket.connect)(f"ipc://{folder / name}")
    return socket
