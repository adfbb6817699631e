"""Responses of /v1/responses that are stored in memory: within limits on bytes and entries, and a share for each key.

When there is no room, the least recently used response of the key with the most bytes is dropped. Using a response
also uses the responses that it continues, after it: the end of a conversation is dropped before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from typing import Any

import msgspec

from llmc_runtime.server.http.errors import ApiError, not_found
from llmc_runtime.server.requests.request_fields import MAX_MESSAGES

MAX_ENTRIES = 10_000
MAX_CONVERSATION = 8 << 20  # bytes of the stored items that a request refers to
_ENTRY_BYTES = 1 << 10  # bytes that are counted for an entry besides its contents
_ITEM_BYTES = 256  # bytes that are counted for an item of its input or output besides its contents


@dataclass
class StoredResponse:
    """A response: `items` is the JSON of each item of its own input, `body` its JSON without output, and `output` the
    JSON of each item of its output by id. It continues the response `previous`.
    """

    id: str
    previous: str | None
    items: Sequence[bytes]
    body: bytes = b""
    output: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes that are counted for it."""
        items = sum(len(item) + _ITEM_BYTES for item in (*self.items, *self.output.values()))
        return _ENTRY_BYTES + len(self.body) + items

    @cached_property
    def length(self) -> int:
        """The bytes of the items of a complete response."""
        return sum(map(len, self.items)) + sum(map(len, self.output.values()))

    @cached_property
    def count(self) -> int:
        """The number of items of a complete response, at least 1."""
        return max(1, len(self.items) + len(self.output))

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the items of its input. To decode thousands takes milliseconds, so that is done once."""
        return list(map(_decode_id, self.items))

    def document(self) -> list[bytes]:
        """Return the parts of the response's JSON."""
        return [b'{"output":[', *separated(self.output.values()), b"],", self.body[1:]]


@dataclass
class _OfKey:
    """The stored responses of a key, least recently used first, and the bytes of these and of pending ones."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    names: dict[str, str] = field(default_factory=dict)  # the response of each item of an output
    used: int = 0


class _Item(msgspec.Struct):
    id: str


def _decode_id(item: bytes) -> str:
    return msgspec.json.decode(item, type=_Item).id


def separated(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the JSON of the items of a list, and the commas between them."""
    for i, item in enumerate(items):
        if i:
            yield b","
        yield item


class ResponseStore:
    """Stores at most `maximum` bytes; 0: nothing. Belongs to the server's event loop.

    `keys` is the number of API keys; if there are several, none of them may use more than half. `refusal` creates the
    exception for a response that finds no room for now.
    """

    def __init__(self, maximum: int, keys: int, refusal: Callable[[], ApiError]) -> None:
        self.enabled, self.used, self.count = maximum > 0, 0, 0
        self._refusal, self._keys = refusal, defaultdict[str, _OfKey](_OfKey)
        share = 2 if keys > 1 else 1
        self._limits = maximum, MAX_ENTRIES
        self._shares = maximum // share, MAX_ENTRIES // share

    def get(self, key: str, name: str) -> StoredResponse:
        """Return a response of this key. Raises ApiError 404."""
        entry = self._keys[key].entries.get(name)
        if entry is None:
            raise self._missing(name)
        return entry

    def delete(self, key: str, name: str) -> None:
        """Drop a response of this key. Raises ApiError 404."""
        self.get(key, name)
        self._drop(key, name)

    def earlier(self, key: str, name: str | None, references: Sequence[str]) -> bytes:
        """Return responses_request.Earlier as JSON: the items before those of a response that continues response
        `name`, and the items with the ids `references` that are stored.

        Raises ApiError 404 if one of the responses is no longer stored, and 400 if their items are too long.
        """
        chain, referenced, _ = self._resolved(key, name, references)
        previous = [item for entry in reversed(chain) for item in (*entry.items, *entry.output.values())]
        named = [msgspec.json.encode(item) + b":" + stored for item, stored in referenced.items()]
        return b"".join((b'{"previous":[', *separated(previous), b'],"referenced":{', *separated(named), b"}}"))

    def length(self, key: str, name: str | None, references: Sequence[str]) -> int:
        """Return the bytes of the items that `earlier` returns, without copying them. Raises the same errors."""
        return self._resolved(key, name, references)[2]

    def begin(self, key: str, name: str, previous: str | None, items: Sequence[bytes]) -> PendingResponse:
        """Reserve room for a response that is being generated. The caller closes it.

        Raises ApiError 400 if it can never be stored, and the refusal if others take the room for now.
        """
        entry = StoredResponse(name, previous, items)
        if entry.size > self._shares[0]:
            cause = f"store: the input has {sum(map(len, items))} bytes in {len(items)} items; all responses of a key"
            cause += f" have up to {self._shares[0]}"
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
        """Release the space reserved for a response."""
        self._count(key, -reserved, -1)

    def _resolved(
        self, key: str, name: str | None, references: Sequence[str]
    ) -> tuple[list[StoredResponse], dict[str, bytes], int]:
        """Return a chain of responses, the newest first, the items of `references`, and the bytes of all items."""
        chain = self._chain(key, name)
        total = sum(entry.length for entry in chain)
        referenced = dict[str, bytes]()
        for item in references:
            document = self._item(key, item)
            if document is not None:
                referenced[item] = document
                total += len(document)
                self._check_length(total)
        return chain, referenced, total

    def _chain(self, key: str, name: str | None) -> list[StoredResponse]:
        """Return a response and those that it continues, the newest first.

        Raises ApiError 404 if one is missing, and 400 if their items are too many or too long. A chain has up to
        MAX_MESSAGES responses, so that each may take no longer than a microsecond.
        """
        entries = self._keys[key].entries
        first = name
        chain: list[StoredResponse] = []
        count = total = 0
        while name is not None:
            entry = entries.get(name)
            if entry is None:
                raise self._missing_previous(name, first)
            chain.append(entry)
            count += entry.count
            total += entry.length
            if count > MAX_MESSAGES:
                cause = f"the earlier responses have more than {MAX_MESSAGES} items; begin a new conversation"
                raise ApiError(cause, param="previous_response_id", code="context_length_exceeded")
            if total > MAX_CONVERSATION:
                self._check_length(total)
            name = entry.previous
        return chain

    def _missing_previous(self, name: str, first: str | None) -> ApiError:
        """Return the error for a chain that begins with the response `first`, as `name` is not stored."""
        error = self._missing(name)
        error.param, error.code = "previous_response_id", "previous_response_not_found"
        if name != first:
            error.message += "; the response that was named continues it"
        return error

    def _missing(self, name: str) -> ApiError:
        cause = f"the response {name[:80]!r} is not stored"
        cause += "" if self.enabled else ": this server stores none (--response-store-bytes)"
        return not_found(cause, "response_id", "response_not_found")

    def _use(self, key: str, name: str | None) -> None:
        """Mark a response and those that it continues as used, the last ones as the most recent."""
        entries = self._keys[key].entries
        while name is not None and (entry := entries.get(name)) is not None:
            entries.move_to_end(name)
            name = entry.previous

    def _item(self, key: str, name: str) -> bytes | None:
        of_key = self._keys[key]
        response = of_key.names.get(name)
        return None if response is None else of_key.entries[response].output[name]

    def _check_length(self, total: int) -> None:
        if total > MAX_CONVERSATION:
            cause = f"the earlier responses have more than {MAX_CONVERSATION} bytes; begin a new conversation"
            raise ApiError(cause, param="previous_response_id", code="context_length_exceeded")

    def _make_room(self, key: str, size: int) -> bool:
        """Drop responses until another one of this key with `size` bytes fits. Returns False if that is impossible."""
        if size > self._shares[0]:
            return False
        of_key = self._keys[key]
        while of_key.used + size > self._shares[0] or len(of_key.entries) >= self._shares[1]:
            if not of_key.entries:
                return False
            self._drop(key, next(iter(of_key.entries)))
        if self.used + size <= self._limits[0] and self.count < self._limits[1]:
            return True
        # A heap, as a large response takes the place of thousands of small ones, of perhaps as many keys.
        heaviest = [(-of_owner.used, owner) for owner, of_owner in self._keys.items() if of_owner.entries]
        heapify(heaviest)
        while self.used + size > self._limits[0] or self.count >= self._limits[1]:
            if not heaviest:
                return False
            owner = heaviest[0][1]
            of_owner = self._keys[owner]
            self._drop(owner, next(iter(of_owner.entries)))
            if of_owner.entries:
                heapreplace(heaviest, (-of_owner.used, owner))
            else:
                heappop(heaviest)
        return True

    def _drop(self, key: str, name: str) -> None:
        of_key = self._keys[key]
        entry = of_key.entries.pop(name)
        for item in entry.output:
            del of_key.names[item]
        self._count(key, -entry.size, -1)

    def _count(self, key: str, size: int, number: int) -> None:
        of_key = self._keys[key]
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
        self._entry.output = {item["id"]: msgspec.json.encode(item) for item in response["output"]}
        self._entry.body = msgspec.json.encode({name: value for name, value in response.items() if name != "output"})
        self._open = False
        return self._store.finish(self._key, self._entry, self._reserved)

    def close(self) -> None:
        """Release the room, unless the response was stored."""
        if self._open:
            self._open = False
            self._store.cancel(self._key, self._reserved)
