"""Drafts by suffixes: what followed in the text and in earlier outputs of the same scope, within fixed bounds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from draw import SEED
from llmc_runtime.drafts import DraftContext
from llmc_runtime.sched import suffix_draft
from llmc_runtime.sched.suffix_draft import SuffixDraft


def context(number: int, tokens: list[int], num_prompt: int = 0, scope: str = "a") -> DraftContext:
    return DraftContext(str(number), tokens, num_prompt, scope)


def test_drafts_are_the_tokens_that_followed_in_the_text() -> None:
    draft = SuffixDraft()
    assert list(draft.propose(context(0, [1, 2, 3, 4, 5, 9, 1, 2, 3]), 4)) == [4, 5, 9, 1]
    assert list(draft.propose(context(1, [1, 2, 3, 4, 5, 9, 1, 2, 3]), 2)) == [4, 5]
    assert list(draft.propose(context(2, [1, 2, 3, 4, 5]), 4)) == []
    assert list(draft.propose(context(3, [1, 2]), 4)) == []


def test_the_longest_match_decides_and_then_the_majority() -> None:
    draft = SuffixDraft()
    longer = [8, 1, 2, 3, 4, 0, 7, 1, 2, 3, 5, 0, 7, 1, 2, 3, 5, 0, 8, 1, 2, 3]
    assert list(draft.propose(context(0, longer), 2)) == [4, 0]
    often = [1, 2, 3, 5, 0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 6, 1, 2, 3]
    assert list(draft.propose(context(1, often), 1)) == [5]
    assert list(draft.propose(context(1, often), 2)) == [5, 0], "0.67 * 0.5 is likely enough"
    unlike = [n for follower in range(10, 20) for n in (1, 2, 3, follower)] + [1, 2, 3]
    assert list(draft.propose(context(2, unlike), 2)) == [], "each continuation has a probability of 0.1"


def test_ended_outputs_are_used_only_in_their_scope() -> None:
    draft = SuffixDraft()
    first = context(0, [50, 51, 1, 2, 3, 4, 5, 6], num_prompt=2)
    draft.propose(first, 4)
    draft.end(first)
    assert list(draft.propose(context(1, [9, 1, 2, 3]), 2)) == [4, 5]
    assert list(draft.propose(context(2, [9, 1, 2, 3], scope="b"), 2)) == []
    assert list(draft.propose(context(3, [9, 50, 51, 1]), 2)) == [], "the prompt of an output is not kept"


def test_a_text_that_grows_is_followed() -> None:
    draft, tokens = SuffixDraft(), [1, 2, 3]
    one = context(0, tokens)
    assert list(draft.propose(one, 3)) == []
    tokens += [7, 8, 1, 2, 3]
    assert list(draft.propose(one, 3)) == [7, 8, 1]


def test_long_texts_are_indexed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_draft, "INDEXED_PER_DRAFT", 4)
    draft = SuffixDraft()
    tokens = [*range(10, 30), 27, 28, 29]
    one = context(0, tokens)
    found = [list(draft.propose(one, 1)) for _ in range(6)]
    assert found == [[]] * 4 + [[27]] * 2, "the first 4 of its tokens, then 4 more each time"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random outputs of random scopes: the counted memory equals that in use, and indexes end with their outputs."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    monkeypatch.setattr(suffix_draft, "KEPT_TOKENS", 300)
    monkeypatch.setattr(suffix_draft, "MAX_OUTPUT", 100)
    monkeypatch.setattr(suffix_draft, "INDEXED_PER_DRAFT", 50)
    draft = SuffixDraft()
    for number in range(400):
        tokens = rng.choices(range(5), k=rng.randrange(1, 200))
        one = context(number, tokens, rng.randrange(len(tokens)), rng.choice("abc"))
        if rng.random() < 0.8:
            draft.propose(one, 3)
        draft.end(one)
        kept = list(draft._ended)
        assert draft._kept == sum(len(text.tokens) for text in kept) <= 300 and not draft._live
        assert draft._reserved == 0
        places = [p for index in draft._scopes.values() for seed in index._places for p in index._of(seed)]
        assert len(places) <= 300 and {id(tokens) for tokens, _ in places} <= {id(text.tokens) for text in kept}
        assert set(draft._scopes) == {text.scope for text in kept}


def test_an_output_of_its_own_scope_is_forgotten_without_reading_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of an end is bounded by its own tokens, however many outputs are kept: thousands, if all are short."""

    class Ended(deque[suffix_draft._Text]):
        def __iter__(self) -> Iterator[suffix_draft._Text]:
            raise AssertionError("all outputs are read")

    monkeypatch.setattr(suffix_draft, "KEPT_TOKENS", 400)
    draft = SuffixDraft()
    draft._ended = Ended()
    for number in range(300):
        one = context(number, [number, 2, 3, 4, 5], 1, f"key/{number}")
        draft.propose(one, 1)
        draft.end(one)
    assert len(draft._ended) == len(draft._scopes) == 100


def num_places(draft: SuffixDraft) -> int:
    """Return the number of entries of the indexes of live texts."""
    return sum(len(text.index._of(seed)) for text in draft._live.values() for seed in text.index._places)


def test_live_texts_share_the_work_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that drafts for 64 outputs of a long prompt indexes as much as one that drafts for a single output."""
    monkeypatch.setattr(suffix_draft, "INDEXED_PER_DRAFT", 128)
    draft, rng = SuffixDraft(), random.Random(SEED)
    texts = [rng.choices(range(10**6), k=2000) for _ in range(64)]
    contexts = [context(i, text) for i, text in enumerate(texts)]
    for one in contexts:
        draft.propose(one, 1)
    for _ in range(5):
        before = num_places(draft)
        for one in contexts:
            draft.propose(one, 1)
        assert 64 <= num_places(draft) - before <= 128
        before = num_places(draft)
        for one, text in zip(contexts, texts):
            text += rng.choices(range(10**6), k=3)
            draft.propose(one, 1)
        assert 4 * 64 <= num_places(draft) - before <= 128 + 3 * 64, "the index does not fall behind the outputs"


def test_live_texts_share_a_bound_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many long texts, the last tokens of each are indexed, and further ones as far as there is room."""
    monkeypatch.setattr(suffix_draft, "INDEXED_PER_DRAFT", 10**6)
    monkeypatch.setattr(suffix_draft, "LIVE_TOKENS", 3000)
    monkeypatch.setattr(suffix_draft, "MIN_LIVE", 50)
    draft, rng = SuffixDraft(), random.Random(SEED)
    texts = [[*rng.choices(range(10**6), k=2000), 1, 2, 3, 4, 1, 2, 3] for _ in range(8)]
    contexts = [context(i, text) for i, text in enumerate(texts)]
    for one in contexts:
        assert list(draft.propose(one, 1)) == [4], "the last tokens of each text are indexed"
    sizes = [len(text) for text in draft._live.values()]
    assert sizes == [2005, 995, *[50] * 6], "the first text, the room that it left, and MIN_LIVE"
    for _ in range(200):
        for one, text in zip(contexts, texts):
            text += rng.choices(range(10**6), k=3)
            draft.propose(one, 1)
        assert num_places(draft) <= 3000 + 8 * 50
    for one in contexts[:2]:
        draft.end(one)
    before = num_places(draft)
    for one in contexts[2:]:
        draft.propose(one, 1)
    assert num_places(draft) > before, "ended texts leave room to others"
    for one in contexts[2:]:
        draft.end(one)
    assert draft._reserved == 0
