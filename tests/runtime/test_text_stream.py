"""Incremental text equals the full decode, for random ids and every kind of tokenizer, without half characters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from random import Random

import pytest
import textkit
import tokenizers
from draw import of_test
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.text.detokenizer import detokenizer, token_bytes
from llmc_runtime.text.tokenizer import Tokenizer


def byte_level_in_steps() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer whose decoder has another step, as it is after some conversions."""
    made = textkit.byte_level()
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), tokenizers.decoders.Fuse()])
    return made


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": textkit.byte_level,
    "byte-level-in-steps": byte_level_in_steps,
    "sentencepiece": textkit.sentencepiece,
    "gemma": lambda: textkit.sentencepiece(prefix_space=False),
    "strips-two-spaces": lambda: textkit.sentencepiece(strip=2),
    "metaspace": textkit.metaspace,
    "wordpiece": textkit.wordpiece,
    "no-decoder": textkit.bare,
}
# In these every text is the text of any prefix of the ids plus more: what follows a prompt is well defined.
SEPARABLE = ("byte-level", "byte-level-in-steps", "sentencepiece", "gemma", "metaspace", "wordpiece", "no-decoder")


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), {}, {})


def stream(tok: Tokenizer, ids: list[int], prompt: list[int], *, skip: bool) -> list[str]:
    stream = detokenizer(tok, prompt, skip_special_tokens=skip)
    return [*(stream.push(i) for i in ids), stream.flush()]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    tok = tokenizer(kind)
    anything = st.integers(0, tok.vocab_size + 3)
    text = st.one_of(st.text(max_size=20), st.text("a  é", max_size=9)).map(
        lambda t: tok.encode(t.encode("utf-8", "ignore").decode("utf-8"))
    )
    return st.lists(st.one_of(anything.map(lambda i: [i]), text), max_size=12).map(lambda parts: [*chain(*parts)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_joined_are_the_full_decode(kind: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(ids_of(kind), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        tok = tokenizer(kind)
        assert "".join(stream(tok, ids, [], skip=skip)) == tok.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_named_special_tokens_are_shown_where_others_are_skipped(kind: str) -> None:
    tok = tokenizer(kind)

    @settings(max_examples=100, deadline=None)
    @given(ids_of(kind), st.sets(st.sampled_from(sorted(tok.special_ids) or [0])))
    def check(ids: list[int], shown: set[int]) -> None:
        stream = detokenizer(tok, visible=frozenset(shown))
        kept = [i for i in ids if i in shown or i not in tok.special_ids]
        assert "".join([*(stream.push(i) for i in ids), stream.flush()]) == tok.decode(kept, skip_special_tokens=False)

    check()


@pytest.mark.parametrize("kind", SEPARABLE)
def test_after_a_prompt_the_pieces_are_the_rest_of_the_full_decode(kind: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=40), ids_of(kind), st.booleans())
    def check(text: str, ids: list[int], skip: bool) -> None:
        tok = tokenizer(kind)
        prompt = tok.encode(text.encode("utf-8", "ignore").decode("utf-8") + " end.")
        before = tok.decode(prompt, skip_special_tokens=skip)
        whole = tok.decode(prompt + ids, skip_special_tokens=skip)
        assert "".join(stream(tok, ids, prompt, skip=skip)) == whole[len(before) :]

    check()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma"])
@given(text=st.text(min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_no_piece_of_a_proper_text_holds_half_a_character(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    text = text.encode("utf-8", "ignore").decode("utf-8").replace("\ufffd", "")
    ids = tok.encode(text, add_special_tokens=False)
    if any(tok.token(i) == "<unk>" for i in ids):
        return
    assert not any("\ufffd" in piece for piece in stream(tok, ids, [], skip=False))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_character_begun_by_the_prompt_is_completed(kind: str) -> None:
    tok = tokenizer(kind)
    whole = tok.encode("see 🫖", add_special_tokens=False)
    assert len(whole) > 4  # the character is several tokens
    assert "".join(stream(tok, whole[-2:], whole[:-2], skip=True)) == "🫖"


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    tok = tokenizer("sentencepiece")
    prompt, ids = tok.encode("The kernel"), tok.encode("of", add_special_tokens=False)
    assert tok.token(ids[0]) == "▁of"
    assert "".join(stream(tok, ids, prompt, skip=True)) == " of"
    assert "".join(stream(tok, ids, [], skip=True)) == "of"


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma", "strips-two-spaces", "metaspace"])
def test_long_runs_of_spaces_are_decoded_in_short_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that decodes to nothing at the start of a text needs context; a window that grew took 1 ms a token."""
    tok, lengths, draw = tokenizer(kind), list[int](), Random(of_test())
    space, others = tok.token_id("▁"), tok.encode("of é", add_special_tokens=False)
    assert space is not None
    decode = tok.decode
    for share in (1.0, 0.95, 0.5):
        ids = [space if draw.random() < share else draw.choice(others) for _ in range(500)]
        expected = decode(ids, skip_special_tokens=False)
        with monkeypatch.context() as patch:
            patch.setattr(tok, "decode", lambda ids, **how: lengths.append(len(ids)) or decode(ids, **how))
            assert "".join(stream(tok, ids, [], skip=False)) == expected
    assert max(lengths) <= 24


def test_bytes_that_form_no_characters_are_decoded_in_short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of a decoder that replaces incomplete characters does not grow while ids form none."""
    tok, draw, lengths = tokenizer("byte-level-in-steps"), Random(of_test()), list[int]()
    half = tok.encode("東", add_special_tokens=False)[:-1]
    lone, text = tok.encode("é", add_special_tokens=False)[-1:], tok.encode("of 東京", add_special_tokens=False)
    assert "\ufffd" in tok.decode(half) and "\ufffd" in tok.decode(lone)
    decode = tok.decode
    for _ in range(8):
        parts = [half] * draw.randrange(1, 5) + [lone] * draw.randrange(3) + [text] * draw.randrange(2)
        ids = [*chain.from_iterable(draw.choice(parts) for _ in range(300))]
        expected = decode(ids, skip_special_tokens=False)
        with monkeypatch.context() as patch:
            patch.setattr(tok, "decode", lambda ids, **how: lengths.append(len(ids)) or decode(ids, **how))
            pieces = stream(tok, ids, [], skip=False)
        assert "".join(pieces) == expected
        assert all(any(pieces[i : i + 40]) for i in range(len(pieces) - 40)), "text is held back"
    assert max(lengths) <= 40


def test_text_comes_without_delay_where_it_is_certain() -> None:
    tok = tokenizer("byte-level")
    ids = tok.encode("The kernel of 東京", add_special_tokens=False)
    pieces = stream(tok, ids, [], skip=True)
    assert pieces[0] == tok.decode(ids[:1])
    assert pieces[-1] == ""


def test_a_vocabulary_entry_that_is_the_replacement_character_is_text() -> None:
    tok = tokenizer("sentencepiece")
    token = tok.token_id("�")
    assert token is not None
    stream = detokenizer(tok)
    assert stream.push(token) == "�"


@given(text=st.text(max_size=20))
@settings(max_examples=50)
def test_tokens_that_are_bytes_say_which(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode("utf-8")
    tok = tokenizer("byte-level")
    assert b"".join(token_bytes(tok, i) or b"?" for i in tok.encode(text)) == text.encode()
    tok = tokenizer("sentencepiece")
    for character in text:
        raw = [token_bytes(tok, i) for i in tok.encode(character)]
        if None not in raw:  # the vocabulary lacks it
            assert b"".join(filter(None, raw)) == character.encode()
    assert token_bytes(tokenizer("wordpiece"), 5) is None and token_bytes(tok, 1 << 30) is None
