"""The content blocks of /v1/messages and the events that build them, made from the deltas of a chat's message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.parse import document
from llmc_runtime.server.tool_calls.message import Delta

Event = dict[str, Any]


class ContentBlocks:
    """The blocks of one output: thinking, text and tool_use."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._texts: list[str] | None = None  # of the last block, while it is open

    def take(self, delta: Delta) -> Iterator[Event]:
        """Add new output, and yield its events."""
        if delta.reasoning:
            yield from self._extend("thinking", delta.reasoning)
        if delta.content:
            yield from self._extend("text", delta.content)
        for call in delta.calls:
            function = call["function"]
            if "id" in call:
                yield from self.close()
                yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if function["arguments"]:
                yield from self._extend("tool_use", function["arguments"])

    def close(self) -> Iterator[Event]:
        """Complete the last block, and yield its events."""
        if self._texts is None:
            return
        block, text, self._texts = self.blocks[-1], "".join(self._texts), None
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
            yield self._delta("signature", signature=block["signature"])
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to a block of this kind, which is opened unless it is open."""
        if self._texts is None or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        assert self._texts is not None
        self._texts.append(text)
        if kind == "tool_use":
            yield self._delta("input_json", partial_json=text)
        else:
            yield self._delta(kind, **{kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self.blocks.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": f"{kind}_delta", **fields}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(text: str) -> Any:
    """Return the arguments of a call; {} if the output was cut off inside of them."""
    try:
        return document(text.encode(errors="replace") or b"{}")
    except ApiError:
        return {}
