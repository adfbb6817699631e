"""The protocol between the server and a text process: frames of a kind, a length and a payload, on a Unix socket.

A process sends READY once it has started, and in reply to READY: a process that was killed while idle does not reply,
and another one gets the job.

A job starts with a body, in a frame of the kind `job` of its api_routes.PostRoute. If the job has prompts, the process
replies PARSED; the server then requests the ids and the text of each prompt (PROMPTS) or abandons the job (DROP). For
/tokenize, /detokenize and /v1/messages/count_tokens, the process replies ANSWER. Every job ends with DONE or FAILED.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from llmc_runtime.defaults import default_params
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.errors import ApiError

HEAD = struct.Struct("<cQ")
PROMPTS, DROP = b"G", b"N"
READY, PARSED, ANSWER, IDS, TEXT, DONE, FAILED = b"R", b"P", b"A", b"I", b"X", b"D", b"F"

MAX_CONTAINERS = 262_144  # objects and lists in a body
MAX_VALUES = 2_097_152  # values in a body
MAX_FIELD_BYTES = 1 << 20  # bytes of all fields except the prompt, as JSON
MAX_FIELD_CONTAINERS = 16_384  # objects and lists in them
MAX_FIELD_VALUES = 32_768  # values in them, without allowed_token_ids
CPU_SECONDS = 10.0  # per job; the process is killed if it exceeds this
SECONDS = 30.0  # wall time per job, for a heavily loaded machine
MEMORY_BYTES = 1 << 30  # bytes that a process may allocate beyond the tokenizer
KEPT_BYTES = 256 << 20  # growth of resident memory beyond which a process is replaced
OUT_OF_MEMORY = 41  # exit status of a process that ran out of memory
NICE = 10  # the engine and the server take precedence


class TextProcessConfig(msgspec.Struct):
    """The configuration of a text process.

    `tokenizer` is the text of a tokenizer.json (None if there is none). `template`, `tool_calls` and `reasoning` are
    options of llmc-serve. `max_prompt_tokens` is the maximum of one request. `generation` has the sampling defaults.
    `stores`: responses may be stored. `pooling`: None if the model generates. `variables` are the default variables of
    chat templates.
    """

    tokenizer: str | None
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]
    template: str | None
    tool_calls: str
    reasoning: str
    names: list[str]
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    generation: dict[str, Any]
    stores: bool = False
    pooling: Pooling | None = None
    variables: dict[str, Any] = {}

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """Return the model's default sampling parameters (see sampling_fields.Defaults)."""
        return default_params(self.generation, max_tokens=max_tokens)


class Parsed(msgspec.Struct):
    """A checked body.

    `fields` is the JSON of all fields except those that only form the prompt, and `allowed_token_ids`, which are in
    `allowed`, 4 bytes each. `prompts` is the number of prompts, and `known` the number of token ids if there is one
    prompt given as ids. `references` are the ids of stored items that form a part of the prompt.
    """

    fields: bytes
    allowed: bytes | None = None
    prompts: int = 1
    known: int = 0
    references: list[str] = []


class Done(msgspec.Struct):
    """The end of a job.

    `leaves` means that the process exits; `unknown` is the number of unknown fields in the body. For a chat, `reasons`
    is true if the output has reasoning, and `opened` if it starts inside of it; `earlier` is the number of earlier tool
    calls. `items` is the JSON of each item of the input of a response that is to be stored.
    """

    leaves: bool = False
    unknown: int = 0
    reasons: bool = False
    opened: bool = False
    earlier: int = 0
    items: list[bytes] = []


class Failure(msgspec.Struct):
    """A serialized ApiError; `leaves` and `unknown` are as in Done."""

    message: str
    status: int
    kind: str
    param: str | None
    code: str | None
    headers: dict[str, str]
    leaves: bool = False
    unknown: int = 0

    @classmethod
    def of(cls, error: ApiError) -> Failure:
        """Convert an ApiError."""
        return cls(error.message, error.status, error.kind, error.param, error.code, error.headers)

    def error(self) -> ApiError:
        """Convert back to an ApiError."""
        more: dict[str, Any] = {"status": self.status, "kind": self.kind, "param": self.param, "code": self.code}
        return ApiError(self.message, headers=self.headers, **more)
