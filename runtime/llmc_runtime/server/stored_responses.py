"""Responses of /v1/responses that are stored in memory: within limits on bytes and entries, and a share for each key.

When there is no room, the least recently used response of the key with the most bytes is dropped. A response that
continues another one is less recent than that, so that it is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmc_runtime.server.http.errors import ApiError, not_found

MAX_ENTRIES = 10_000
MAX_CONVERSATION = 8 << 20  # bytes of the stored items that a request refers to
_OVERHEAD = 1 << 10  # bytes that are counted for an entry besides its contents
_ITEM_OVERHEAD = 256  # the same for an item of its output


@dataclass
class StoredResponse:
    """A response: `items` is its own input as a JSON array, `body` its JSON without output, and `output` the JSON of
    each item of its output by id. It continues the response `previous`.
    """

    id: str
    previous: str | None
    items: bytes
    body: bytes = b""
    output: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes that are counted for it."""
        output = sum(len(item) + _ITEM_OVERHEAD for item in self.output.values())
        return _OVERHEAD + len(self.items) + len(self.body) + output

    def document(self) -> dict[str, Any]:
        """Return the response."""
        body: dict[str, Any] = msgspec.json.decode(self.body)
        return body | {"output": [msgspec.Raw(item) for item in self.output.values()]}


@dataclass
class _OfKey:
    """The stored responses of a key, least recently used first, and the bytes of these and of pending ones."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    names: dict[str, str] = field(default_factory=dict)  # the response of each item of an output
    used: int = 0


class ResponseStore:
    """Stores at most `maximum` bytes; 0: nothing. `keys` is the number of API keys; if there are several, none of them
    may use more than half. `refusal` creates the exception for a response that finds no room for now.
    """

    def __init__(self, maximum: int, keys: int, refusal: Callable[[], ApiError]) -> None:
        self.enabled, self.used, self.count = maximum > 0, 0, 0
        self._refusal, self._keys = refusal, dict[str, _OfKey]()
        share = 2 if keys > 1 else 1
        self._limits = maximum, MAX_ENTRIES
        self._shares = maximum // share, MAX_ENTRIES // share

    def get(self, key: str, name: str) -> StoredResponse:
        """Return a response of this key. Raises ApiError 404."""
        found = self._keys[key].entries.get(name) if key in self._keys else None
        if found is None:
            cause = f"the response {name[:80]!r} is not stored" + ("" if self.enabled else ": this server stores none")
            raise not_found(cause, "response_id", "response_not_found")
        return found

    def delete(self, key: str, name: str) -> None:
        """Drop a response of this key. Raises ApiError 404."""
        self.get(key, name)
        self._drop(key, name)

    def earlier(self, key: str, name: str | None, references: Sequence[str]) -> bytes:
        """Return responses_request.Earlier as JSON: the items before those of a response that continues response
        `name`, and the items with the ids `references` that are stored.

        Raises ApiError 404 if one of the responses is no longer stored, and 400 if their items are too long.
        """
        parts, total = list[bytes](), 0
        for entry in self._chain(key, name):
            own = [*entry.output.values()]
            if len(entry.items) > 2:
                own.insert(0, entry.items[1:-1])
            parts[:0] = own
            total += sum(map(len, own))
            self._check_length(total)
        referenced = dict[str, bytes]()
        for item in references:
            if (found := self._item(key, item)) is not None:
                referenced[item] = found
                self._check_length(total := total + len(found))
        names = b",".join(msgspec.json.encode(item) + b":" + found for item, found in referenced.items())
        return b'{"previous":[' + b",".join(parts) + b'],"referenced":{' + names + b"}}"

    def begin(self, key: str, name: str, previous: str | None, items: bytes) -> PendingResponse:
        """Reserve room for a response that is being generated. The caller closes it.

        Raises ApiError 400 if it can never be stored, and the refusal if others take the room for now.
        """
        entry = StoredResponse(name, previous, items)
        if entry.size > self._shares[0]:
            cause = f"store: the input has {len(items)} bytes, of which the server stores {self._shares[0]}"
            raise ApiError(f"{cause}; send store: false", param="store")
        self._use(key, previous)
        if not self._make_room(key, entry.size):
            raise self._refusal()
        self._count(key, entry.size, 1)
        return PendingResponse(self, key, entry)

    def finish(self, key: str, entry: StoredResponse, reserved: int) -> bool:
        """Store a response for which `reserved` bytes were reserved. Returns whether there is room for it."""
        self._count(key, -reserved, -1)
        if not self._make_room(key, entry.size):
            return False
        self._count(key, entry.size, 1)
        of_key = self._keys[key]
        of_key.entries[entry.id] = entry
        of_key.names |= dict.fromkeys(entry.output, entry.id)
        self._use(key, entry.id)
        return True

    def cancel(self, key: str, reserved: int) -> None:
        """Release what was reserved for a response."""
        self._count(key, -reserved, -1)

    def _chain(self, key: str, name: str | None) -> Iterator[StoredResponse]:
        """Yield a response and those that it continues, the newest first. Raises ApiError 404 if one is missing."""
        first = name
        while name is not None:
            try:
                entry = self.get(key, name)
            except ApiError as e:
                e.param, e.code = "previous_response_id", "previous_response_not_found"
                if name != first:
                    e.message += "; the response that was named continues it"
                raise
            yield entry
            name = entry.previous

    def _use(self, key: str, name: str | None) -> None:
        """Mark a response and those that it continues as used, the last ones as the most recent."""
        entries = self._keys.setdefault(key, _OfKey()).entries
        while name is not None and (entry := entries.get(name)) is not None:
            entries.move_to_end(name)
            name = entry.previous

    def _item(self, key: str, name: str) -> bytes | None:
        of_key = self._keys.get(key)
        response = None if of_key is None else of_key.names.get(name)
        return None if of_key is None or response is None else of_key.entries[response].output[name]

    def _check_length(self, total: int) -> None:
        if total > MAX_CONVERSATION:
            cause = f"the earlier responses have more than {MAX_CONVERSATION} bytes"
            raise ApiError(cause, param="previous_response_id", code="context_length_exceeded")

    def _make_room(self, key: str, size: int) -> bool:
        """Drop responses until another one of this key with `size` bytes fits. Returns False if that is impossible."""
        if size > self._shares[0]:
            return False
        own = self._keys.setdefault(key, _OfKey())
        while own.used + size > self._shares[0] or len(own.entries) >= self._shares[1]:
            if not own.entries:
                return False
            self._drop(key, next(iter(own.entries)))
        while self.used + size > self._limits[0] or self.count >= self._limits[1]:
            others = [one for one, of_key in self._keys.items() if of_key.entries]
            if not others:
                return False
            heaviest = max(others, key=lambda one: self._keys[one].used)
            self._drop(heaviest, next(iter(self._keys[heaviest].entries)))
        return True

    def _drop(self, key: str, name: str) -> None:
        of_key = self._keys[key]
        entry = of_key.entries.pop(name)
        for item in entry.output:
            del of_key.names[item]
        self._count(key, -entry.size, -1)

    def _count(self, key: str, size: int, number: int) -> None:
        of_key = self._keys.setdefault(key, _OfKey())
        of_key.used += size
        self.used += size
        self.count += number


class PendingResponse:
    """Room for a response that is being generated, reserved until `close` unless it was stored."""

    def __init__(self, store: ResponseStore, key: str, entry: StoredResponse) -> None:
        self._store, self._key, self._entry = store, key, entry
        self._reserved, self._open = entry.size, True

    def finish(self, response: dict[str, Any]) -> bool:
        """Store the complete response. Returns whether there is room for it."""
        if not self._open:
            return False
        self._open = False
        self._entry.output = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
        self._entry.body = msgspec.json.encode(response | {"output": []})
        return self._store.finish(self._key, self._entry, self._reserved)

    def close(self) -> None:
        """Release the room, unless the response was stored."""
        if self._open:
            self._open = False
            self._store.cancel(self._key, self._reserved)
