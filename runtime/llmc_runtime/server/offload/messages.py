"""What the server and a text process say to each other: frames of a kind, a length and a payload on a Unix socket.

A job begins with a body (COMPLETION, CHAT, TOKENIZE, DETOKENIZE). The process answers a completion or a chat with
PARSED; then the server sends PROMPTS, for a text and ids of each prompt, or DROP. It answers the other two with ANSWER.
Every job ends with DONE or FAILED.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from llmc_runtime.server.errors import ApiError

HEAD = struct.Struct("<cQ")
COMPLETION, CHAT, TOKENIZE, DETOKENIZE = b"C", b"H", b"K", b"U"
PROMPTS, DROP = b"G", b"N"
READY, PARSED, ANSWER, IDS, TEXT, DONE, FAILED = b"R", b"P", b"A", b"I", b"X", b"D", b"F"

MAX_CONTAINERS = 262_144  # objects and lists of a body
MAX_VALUES = 2_097_152  # and all values
MAX_FIELDS = 1 << 20  # bytes of all fields that are no prompt, as JSON
MAX_FIELD_CONTAINERS = 16_384  # objects and lists in them
CPU_SECONDS = 10.0  # of one job; the process is killed when it passes them
SECONDS = 30.0  # wall time of one job, for a machine that has no processor to spare
MEMORY_BYTES = 1 << 30  # that a process may allocate beside the tokenizer
KEPT_BYTES = 256 << 20  # resident memory above that of its start with which a process is not kept
OUT_OF_MEMORY = 41  # the exit code of a process whose job had not enough
NICE = 10  # the engine and the server go first


class Spec(msgspec.Struct):
    """What a text process serves: a tokenizer.json (None: there is none), its named tokens and chat templates, the
    options of llmc-serve, limits of the model, `most_tokens` that one request may have, sampling defaults."""

    tokenizer: str | None
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]
    template: str | None
    tool_calls: str
    reasoning: str
    names: list[str]
    vocab_size: int
    max_model_len: int
    most_tokens: int
    generation: dict[str, Any]


class Parsed(msgspec.Struct):
    """A checked body: its fields as JSON, without those that only the prompt is made of; how many prompts there are,
    and token ids where they are one list of these; how many earlier calls a conversation has."""

    fields: bytes
    prompts: int = 1
    known: int = 0
    earlier: int = 0


class Done(msgspec.Struct):
    """The end of a job. `leaves`: the process ends now; `unknown`: fields of the body that nobody knows. Of a chat:
    whether its output has reasoning, and begins within it."""

    leaves: bool = False
    unknown: int = 0
    reasons: bool = False
    opened: bool = False


class Failure(msgspec.Struct):
    """An ApiError; see there."""

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
        """The message for an error."""
        return cls(error.message, error.status, error.kind, error.param, error.code, error.headers)

    def error(self) -> ApiError:
        """The error of a message."""
        more: dict[str, Any] = {"status": self.status, "kind": self.kind, "param": self.param, "code": self.code}
        return ApiError(self.message, headers=self.headers, **more)
