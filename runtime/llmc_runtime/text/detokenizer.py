"""Incremental detokenization: converts ids to text one by one, without ever emitting part of a character.

Invariant: the pieces of all pushes and of the final flush, joined, equal the decoded text of the whole list, minus the
text of the prompt. If the tokenizer's decoding cannot be split after a token, the text is held until it can.
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
_PRIMED_TOKENS = 8  # prompt tokens to examine: a character has at most 4 bytes
_PRIME_MAX = 64
_MAX_HELD = 16  # ids of a lossy decoder that are held while the text ends with U+FFFD


class Detokenizer(Protocol):
    """Decodes ids pushed one by one."""

    def push(self, token_id: int) -> str:
        """Append an id and return the text that is now certain, which may be ""."""

    def flush(self) -> str:
        """Return the text still held back, with incomplete characters as U+FFFD. No ids may be pushed afterwards."""


def detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    visible: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Return a detokenizer for the tokenizer's decoder.

    `prompt_ids` precede the first pushed id; with them, a word that continues the prompt keeps its leading space. The
    special tokens in `visible` are decoded even if special tokens are skipped.
    """
    skip = tokenizer.special_ids - visible if skip_special_tokens else frozenset()
    kinds = _decoder_kinds(tokenizer)
    if kinds == ("ByteLevel",):
        return _ByteLevelDetokenizer(tokenizer, skip, prompt_ids)
    return _WindowDetokenizer(tokenizer, skip, prompt_ids, kinds)


def _byte_alphabet() -> Mapping[str, int]:
    """Return the character of each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in printable]
    return MappingProxyType({chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(other)})


_ALPHABET = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """Return the bytes of a token, which may begin or end inside a character; None if the token is plain text."""
    token, kinds = tokenizer.token(token_id) or "", _decoder_kinds(tokenizer)
    if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(match[1])
    if "ByteLevel" in kinds and token and all(c in _ALPHABET for c in token):
        return bytes([_ALPHABET[c] for c in token])
    return None


class _ByteLevelDetokenizer:
    """Detokenizer for byte-level vocabularies. Every token is bytes, so the only state is a UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._token, self._pieces = tokenizer.token, tokenizer.pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False  # the decoder holds the first bytes of a character
        for token_id in prompt_ids[-_PRIMED_TOKENS:]:
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
        """Return the bytes of a token, and their text if they form whole characters."""
        token = self._token(token_id)
        if token is None:
            return b"", ""
        try:
            raw = bytes([_ALPHABET[c] for c in token])
        except KeyError:  # an added token, stored as plain text
            raw = token.encode("utf-8")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        piece = self._pieces[token_id] = raw, text
        return piece

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Detokenizer for all other decoders. Each push decodes a short window of ids; ids[:done] are already emitted."""

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
            return ""  # a run of byte tokens is decoded as a whole: one invalid byte affects all of it
        text = self._decode(self._ids)
        if not text.startswith(self._text):
            return ""
        if self._lossy and text.endswith("\ufffd"):
            return self._settled(text) if len(self._ids) - self._done > _MAX_HELD else ""
        piece = text[len(self._text) :]
        for context in (self._ids[self._done :], self._ids[-_PRIMED_TOKENS:]):
            if tail := self._decode(context):  # enough context: the decoder strips at most the start of a text
                self._ids, text = context, tail
                break
        self._done, self._text = len(self._ids), text
        return piece

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._text) :]

    def _settled(self, text: str) -> str:
        """Return the new text but for its last character, the only one that further ids can change, and keep a short
        window: while ids form no characters, the window would grow with each of them.
        """
        ids = self._ids[-_PRIMED_TOKENS:]  # an incomplete character has at most 3 bytes
        tail = self._decode(ids)
        if not tail.endswith("\ufffd"):
            return ""
        piece = text[len(self._text) : -1]
        self._ids, self._done, self._text = ids, 0, tail[:-1]
        return piece

    def _visible(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.token(token_id) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _byte(self, token_id: int) -> int | None:
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id) or "")
        return int(match[1], 16) if match else None

    def _prime(self, prompt_ids: Sequence[int]) -> tuple[list[int], int]:
        """Return a window over the end of the prompt, and how many of its ids count as emitted: all but those of an
        incomplete last character.
        """
        ids: list[int] = []
        for token_id in reversed(prompt_ids[-_PRIME_MAX:]):
            if not self._visible(token_id):
                continue
            ids.insert(0, token_id)
            if len(ids) >= _PRIMED_TOKENS and self._byte(token_id) is None and self._decode(ids):
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
    """Return the bytes at the end of `run` that start a UTF-8 character without completing it."""
    try:
        run.decode("utf-8")
    except UnicodeDecodeError as e:
        return run[e.start :] if e.reason == "unexpected end of data" else b""
    return b""


def _decoder_kinds(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the types of the decoder's steps in order, as named in tokenizer.json."""
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
