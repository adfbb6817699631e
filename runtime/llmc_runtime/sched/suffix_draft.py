"""SuffixDraft: drafts what followed the longest suffix of the text where it occurred before (--speculate suffix).

The method is that of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): occurrences are searched for in the text
itself and in earlier outputs of the same scope, and the draft follows the continuation that is most frequent among the
longest matches, as long as it is likely. In place of a suffix tree there is an index from each sequence of MIN_MATCH
tokens to its latest occurrences, from which matches are extended backwards. That bounds memory and time: a token takes
one entry of an index (250 to 1,000 bytes), and a draft compares at most 2 * OCCURRENCES * MAX_MATCH tokens. Texts share
the limits on the tokens that are indexed: a step drafts for many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmc_runtime.sched.host_draft import Draft, DraftContext

MIN_MATCH = 3  # tokens of the shortest suffix that is searched for
MAX_MATCH = 24  # tokens by which matches are ranked
OCCURRENCES = 16  # latest occurrences of a sequence of MIN_MATCH tokens that are compared
INDEXED_PER_DRAFT = 1024  # tokens of live texts, and of ended outputs, that are indexed while each text gets a draft
MAX_NEW = 32  # tokens of a text since its last draft that are indexed besides
LIVE_TOKENS = 1 << 18  # tokens of live texts that are indexed, unless a text has fewer than MIN_LIVE
MIN_LIVE = 1024
MAX_OUTPUT = 4096  # last tokens of an ended output that are kept
KEPT_TOKENS = 1 << 16  # tokens of ended outputs that are kept, over all scopes
MIN_PROBABILITY = 0.3  # a draft ends where its tokens together are less likely than this, by the continuations found

_Place = tuple[Sequence[int], int]  # tokens, and a position in them


class _Index:
    """The latest occurrences of each sequence of MIN_MATCH tokens: the tokens it is in, and the position after it.

    num_texts: ended outputs that are kept for it
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], _Place | deque[_Place]] = {}  # most sequences occur once
        self.num_texts = 0

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, tokens: Sequence[int], end: int) -> None:
        """Add the sequence before `end`."""
        seed, place = tuple(tokens[end - MIN_MATCH : end]), (tokens, end)
        places = self._places.get(seed)
        if places is None:
            self._places[seed] = place
        elif isinstance(places, deque):
            places.append(place)
        else:
            self._places[seed] = deque((places, place), OCCURRENCES)

    def remove(self, tokens: Sequence[int], end: int) -> None:
        """Remove the sequence before `end` of the tokens that were added first."""
        seed = tuple(tokens[end - MIN_MATCH : end])
        places = self._of(seed)
        if places and places[0][0] is tokens and places[0][1] == end:
            if isinstance(places, deque) and len(places) > 1:
                places.popleft()
            else:
                del self._places[seed]

    def _of(self, seed: tuple[int, ...]) -> Sequence[_Place]:
        """Return the occurrences of a sequence."""
        places = self._places.get(seed, ())
        return (places,) if isinstance(places, tuple) and places else places

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, _Place]]:
        """Yield the occurrences of suffixes of `text`, except its own end, with their lengths in tokens."""
        known = len(text)
        for tokens, end in self._of(tuple(text[-MIN_MATCH:])):
            if tokens is text and end == known:
                continue
            length, longest = MIN_MATCH, min(MAX_MATCH, end, known)
            while length < longest and tokens[end - length - 1] == text[known - length - 1]:
                length += 1
            yield length, (tokens, end)


@dataclass(slots=True, eq=False)
class _Text:
    """Tokens of which those from `first` up to `num_indexed` are in the index.

    num_seen:   tokens at the last draft
    reserved:   of a live text: tokens of LIVE_TOKENS that it takes, whether they are indexed yet or not
    """

    tokens: Sequence[int]
    index: _Index
    scope: str = ""
    first: int = MIN_MATCH - 1
    num_indexed: int = field(default=0, init=False)
    num_seen: int = field(default=0, init=False)
    reserved: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_indexed, self.num_seen = self.first, len(self.tokens)

    def __len__(self) -> int:
        """The number of tokens in the index."""
        return self.num_indexed - self.first

    def catch_up(self, limit: int) -> int:
        """Add up to `limit` more tokens to the index. Return the limit that is left."""
        end = min(len(self.tokens), self.num_indexed + limit)
        for at in range(self.num_indexed + 1, end + 1):
            self.index.add(self.tokens, at)
        limit -= max(0, end - self.num_indexed)
        self.num_indexed = max(self.num_indexed, end)
        return limit


class SuffixDraft(Draft):
    """Drafts from the output's own tokens, prompt included, and from ended outputs of its scope."""

    def __init__(self) -> None:
        self._live: dict[str, _Text] = {}
        self._reserved = 0  # how many of LIVE_TOKENS live texts have reserved
        self._scopes: dict[str, _Index] = {}  # indexes of ended outputs, by scope
        self._ended: deque[_Text] = deque()  # oldest first
        self._unindexed: deque[_Text] = deque()  # those of them that are not indexed to their end, oldest first
        self._kept = 0  # tokens of ended outputs

    def propose(self, context: DraftContext, max_tokens: int) -> Sequence[int]:
        """Return the likeliest continuation of the longest matches."""
        text = self._live.get(context.id) or self._begin(context)
        share = max(1, INDEXED_PER_DRAFT // len(self._live))
        self._follow(text, share)
        self._index_ended(share)
        longest, places = MIN_MATCH, list[_Place]()
        for index in (text.index, self._scopes.get(context.scope)):
            for length, place in index.matches(context.tokens) if index else ():
                if length > longest:
                    longest, places = length, []
                if length == longest:
                    places.append(place)
        return list(_continued(places, max_tokens))

    def end(self, context: DraftContext) -> None:
        """Keep the output for later ones of its scope."""
        live = self._live.pop(context.id, None)
        if live is not None:
            self._reserved -= live.reserved
        output = tuple(context.tokens[context.num_prompt :][-MAX_OUTPUT:])
        if len(output) <= MIN_MATCH:
            return
        text = _Text(output, self._scopes.setdefault(context.scope, _Index()), context.scope)
        text.index.num_texts += 1
        self._ended.append(text)
        self._unindexed.append(text)
        self._kept += len(output)
        while self._kept > KEPT_TOKENS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Remove the output that ended first from the index."""
        text = self._ended.popleft()
        if self._unindexed and self._unindexed[0] is text:
            self._unindexed.popleft()
        for at in range(MIN_MATCH, text.num_indexed + 1):
            text.index.remove(text.tokens, at)
        text.index.num_texts -= 1
        if not text.index.num_texts:
            del self._scopes[text.scope]
        self._kept -= len(text.tokens)

    def _begin(self, context: DraftContext) -> _Text:
        """Follow a new text: all of it, or its last tokens if there is no room for more."""
        tokens = context.tokens
        room = max(MIN_LIVE, LIVE_TOKENS - self._reserved)
        text = self._live[context.id] = _Text(tokens, _Index(), first=max(MIN_MATCH - 1, len(tokens) - room))
        text.reserved = max(0, len(tokens) - text.first)
        self._reserved += text.reserved
        return text

    def _follow(self, text: _Text, share: int) -> None:
        """Index `share` more tokens of a text, and those that are new, as far as there is room."""
        limit = share + min(MAX_NEW, len(text.tokens) - text.num_seen)
        text.num_seen = len(text.tokens)
        room = max(text.reserved, MIN_LIVE, text.reserved + LIVE_TOKENS - self._reserved) - len(text)
        text.catch_up(max(0, min(limit, room)))
        if len(text) > text.reserved:
            self._reserved += len(text) - text.reserved
            text.reserved = len(text)

    def _index_ended(self, limit: int) -> None:
        """Index up to `limit` more tokens of ended outputs."""
        while self._unindexed and limit:
            limit = self._unindexed[0].catch_up(limit)
            if self._unindexed[0].num_indexed == len(self._unindexed[0].tokens):
                self._unindexed.popleft()


def _continued(places: list[_Place], max_tokens: int) -> Iterator[int]:
    """Yield the tokens that most of the continuations agree on, up to `max_tokens`, while they are likely together."""
    probability = 1.0
    for ahead in range(max_tokens):
        places = [(tokens, end) for tokens, end in places if end + ahead < len(tokens)]
        if not places:
            return
        token, count = Counter(tokens[end + ahead] for tokens, end in places).most_common(1)[0]
        probability *= count / len(places)
        if probability < MIN_PROBABILITY:
            return
        places = [(tokens, end) for tokens, end in places if tokens[end + ahead] == token]
        yield token
