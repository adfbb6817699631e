"""Incremental detokenizer: text of a growing list of ids, token by token, never half a character; no stop rules.

Invariant: the pieces of all pushes and the final flush, joined, equal the decode of the whole list (less the text of
the prompt it was primed with). Where a tokenizer's decode is not separable at a token, the piece is held until it is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from llmc_runtime.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRIME = 8  # prompt tokens looked at: a character has at most 4 bytes
_PRIME_MOST = 64


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """Text of the ids pushed so far, given out in pieces.

    `prompt_ids` are the ids before the first pushed one: a word that continues the prompt keeps its leading space.
    `visible` special tokens have their text even where special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        skip = tokenizer.special_ids - visible if skip_special_tokens else frozenset()
        kinds = _decoder_kinds(tokenizer)
        self._stream: _Stream
        if kinds == ("ByteLevel",):
            self._stream = _ByteLevelStream(tokenizer, skip, prompt_ids)
        else:
            self._stream = _WindowStream(tokenizer, skip, prompt_ids, kinds)

    def push(self, token_id: int) -> str:
        """Take one more id; the text that is certain now ("" where the id's text is not, or it has none)."""
        return self._stream.push(token_id)

    def flush(self) -> str:
        """The text still held back, broken characters as U+FFFD; the detokenizer takes no ids after it."""
        return self._stream.flush()


def _byte_alphabet() -> Mapping[str, int]:
    """The printable character of each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in kept]
    return MappingProxyType({chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(rest)})


_ALPHABET = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """The bytes that a token stands for, which may begin or end within a character; None where it is plain text."""
    token, kinds = tokenizer.token(token_id) or "", _decoder_kinds(tokenizer)
    if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(match[1])
    if "ByteLevel" in kinds and token and all(c in _ALPHABET for c in token):
        return bytes([_ALPHABET[c] for c in token])
    return None


class _ByteLevelStream:
    """Byte-level vocabularies: every token is bytes, so a UTF-8 decoder is all the state there is."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._token, self._pieces = tokenizer.token, tokenizer.pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False  # the decoder holds the first bytes of a character
        for token_id in prompt_ids[-_PRIME:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        raw, text = self._pieces.get(token_id) or self._piece(token_id)
        if text is not None and not self._begun:
            return text
        text = self._utf8.decode(raw)
        self._begun = bool(self._utf8.getstate()[0])
        return text

    def _piece(self, token_id: int) -> tuple[bytes, str | None]:
        """The bytes of a token, and their text where they are whole characters."""
        token = self._token(token_id)
        if token is None:
            return b"", ""
        try:
            raw = bytes([_ALPHABET[c] for c in token])
        except KeyError:  # an added token, spelled as plain text
            raw = token.encode("utf-8")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        found = self._pieces[token_id] = raw, text
        return found

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: a short window of ids is decoded again with each push; ids[:done] are given out already."""

    def __init__(
        self, tokenizer: Tokenizer, skip: frozenset[int], prompt_ids: Sequence[int], kinds: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._fallback = "ByteFallback" in kinds
        self._lossy = "ByteLevel" in kinds
        self._ids, self._done = self._prime(prompt_ids)
        self._text = self._decode(self._ids[: self._done])

    def push(self, token_id: int) -> str:
        if not self._visible(token_id):
            return ""
        self._ids.append(token_id)
        if self._fallback and self._byte(token_id) is not None:
            return ""  # a run of byte tokens is decoded as a whole: one bad byte spoils all of it
        text = self._decode(self._ids)
        if (self._lossy and text.endswith("\ufffd")) or not text.startswith(self._text):
            return ""
        piece = text[len(self._text) :]
        tail = self._decode(self._ids[self._done :])
        if tail:  # enough context by itself: the decoder strips at most the start of a text
            self._ids, text = self._ids[self._done :], tail
        self._done, self._text = len(self._ids), text
        return piece

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._text) :]

    def _visible(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.token(token_id) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _byte(self, token_id: int) -> int | None:
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id) or "")
        return int(match[1], 16) if match else None

    def _prime(self, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
        """The window over the prompt's tail and how much of it is given out: all but a broken last character."""
        ids: list[int] = []
        for token_id in reversed(prompt_ids[-_PRIME_MOST:]):
            if not self._visible(token_id):
                continue
            ids.insert(0, token_id)
            if len(ids) >= _PRIME and self._byte(token_id) is None and self._decode(ids):
                break
        if not self._fallback:
            return ids, len(ids)
        run: list[int] = []
        while ids and (byte := self._byte(ids[-1])) is not None:
            run.insert(0, byte)
            ids.pop()
        broken = _incomplete_tail(bytes(run))
        pending = [t for t in (self._tokenizer.token_id(f"<0x{b:02X}>") for b in broken) if t is not None]
        return ids + pending, len(ids)


def _incomplete_tail(run: bytes) -> bytes:
    """The bytes at the end of `run` that begin a UTF-8 character and do not finish it."""
    try:
        run.decode("utf-8")
    except UnicodeDecodeError as e:
        return run[e.start :] if e.reason == "unexpected end of data" else b""
    return b""


def _decoder_kinds(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The types of the decoder's steps in order, as tokenizer.json names them."""
    if tokenizer.decoder_kinds is None:
        decoder = tokenizer.backend.decoder
        tokenizer.decoder_kinds = () if decoder is None else tuple(_kinds(json.loads(decoder.__getstate__())))
    return tokenizer.decoder_kinds


def _kinds(state: Mapping[str, Any]) -> Iterable[str]:
    if state["type"] == "Sequence":
        for step in state["decoders"]:
            yield from _kinds(step)
    else:
        yield state["type"]
