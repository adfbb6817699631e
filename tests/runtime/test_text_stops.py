"""Stop strings: which one matches first, the text that remains, and the text that may be streamed before the end."""

from __future__ import annotations

import pytest
import textkit
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.text.output_text import OutputText, StopStrings
from llmc_runtime.text.tokenizer import Tokenizer

TOK = Tokenizer(textkit.byte_level(), {}, {})
TINY = st.text("ab ", max_size=12)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest of those ending there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TINY, st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_the_result_does_not_depend_on_how_the_text_is_divided(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    rule = StopStrings(stops, include=include)
    expected = reference(text, stops, include)
    grown, shown = "", 0
    while len(grown) < len(text):
        start = len(grown)
        grown = text[: start + data.draw(st.integers(1, 4))]
        hit = rule.check(grown, start)
        if hit is not None:
            assert (grown[: hit.cut], hit.string) == expected
            assert shown <= hit.cut, "text of a stop string was shown"
            return
        shown = max(0, len(grown) - rule.hold)
        assert rule.hold == (0 if include or not stops else max(map(len, stops)) - 1)
    assert expected == (text, None)


class Letters:
    """A detokenizer whose tokens are the indices of `pieces`, and which holds `rest` back."""

    def __init__(self, pieces: list[str], rest: str) -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.rest


@given(st.lists(st.text("ab ", max_size=4), max_size=8), TINY, st.lists(TINY.filter(bool), max_size=3), st.booleans(),
       st.integers(0, 4), st.data())  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_the_output_is_that_of_the_whole_text_whenever_it_is_read(
    pieces: list[str], rest: str, stops: list[str], include: bool, least: int, data: st.DataObject
) -> None:
    out = OutputText(None, [], stop=stops, include_stop=include, min_tokens=least)
    out._detokenizer = Letters(pieces, rest)  # type: ignore[assignment]
    shown = ""
    for token in range(len(pieces)):
        out.push(token)
        if data.draw(st.booleans()):
            shown += out.new_text(later=data.draw(st.integers(0, 3)))
            assert out.text.startswith(shown)
    out.finish()
    assert shown + out.new_text(final=True) == out.text
    first = len("".join(pieces[:least]))
    if len(pieces) <= least:
        first = len("".join(pieces) + rest)
    whole, ends = "".join(pieces) + rest, range(first + 1, len("".join(pieces) + rest) + 1)
    found = next(((end, max((s for s in stops if whole[:end].endswith(s)), key=len)) for end in ends
                  if any(whole[:end].endswith(s) for s in stops)), None)  # fmt: skip
    if found is None:
        assert (out.text, out.stopped_by) == (whole, None)
    else:
        end, stop = found
        assert (out.text, out.stopped_by) == (whole[: end if include else end - len(stop)], stop)


def run(text: str, **options: object) -> tuple[list[str], OutputText]:
    out = OutputText(TOK, [], **options)  # type: ignore[arg-type]
    pieces = []
    for token in TOK.encode(text):
        out.push(token)
        pieces.append(out.new_text())
        if out.stopped_by:
            break
    out.finish()
    return [*pieces, out.new_text(final=True)], out


def test_the_string_that_completes_earliest_wins() -> None:
    pieces, out = run("the sea and the sky", stop=["sea and the", "nd"])
    assert out.stopped_by == "nd"
    assert "".join(pieces) == out.text == "the sea a"


@pytest.mark.parametrize(("include", "text"), [(False, "the sea"), (True, "the sea and")])
def test_the_stop_string_is_kept_if_requested(include: bool, text: str) -> None:
    pieces, out = run("the sea and the sky", stop=[" and"], include_stop=include)
    assert "".join(pieces) == out.text == text


def test_nothing_of_a_stop_string_is_streamed_before_it_is_known() -> None:
    stop = " and the sky"
    text = "the sea and the moon and the sky"
    pieces, out = run(text, stop=[stop])
    assert "".join(pieces) == out.text == "the sea and the moon"
    shown = ""
    for piece in pieces:
        shown += piece
        assert out.text.startswith(shown)


def test_a_stop_string_counts_only_beyond_min_tokens() -> None:
    ids = TOK.encode("the sea the sea")
    first = len(TOK.encode("the sea"))
    pieces, out = run("the sea the sea", stop=["sea"])
    assert (out.text, out.stopped_by) == ("the ", "sea")
    pieces, out = run("the sea the sea", stop=["sea"], min_tokens=first)
    assert (out.text, out.stopped_by) == ("the sea the ", "sea")
    pieces, out = run("the sea the sea", stop=["sea"], min_tokens=len(ids))
    assert (out.text, out.stopped_by) == ("the sea the sea", None)
    assert "".join(pieces) == out.text


def test_a_stop_string_in_the_text_held_back_to_the_end_is_found() -> None:
    """With byte fallback an emoji's bytes become text when the run of bytes ends, here with the last token."""
    tok = Tokenizer(textkit.sentencepiece(), {}, {})
    out = OutputText(tok, [], stop=["🫖"])
    for token in tok.encode("see🫖", add_special_tokens=False):
        assert out.push(token) is None
    assert out.finish() == "🫖"
    assert out.text == "see"


def test_without_a_tokenizer_there_is_no_text() -> None:
    out = OutputText(None, [])
    assert out.push(3) is None
    assert out.finish() is None
    assert out.text == ""
