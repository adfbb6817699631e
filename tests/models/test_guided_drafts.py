"""Drafts for requests whose masks depend on their tokens: the same tokens as without, with every method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams
from llmc_runtime.sched.lookup_first import LookupFirst
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation

from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.deferred_device import defer

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
SIBLING, HEAD = DEMO.parent / "demo-model-small", DEMO.parent / "demo-model-head"
METHODS = ("ngram:4", "ngram:1", "suffix:3", "draft:4", "eagle:4")
REPEAT = "one two three. one two three. one two three. one two"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "words": {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 4, "maxItems": 9},
    },
    "required": ["name", "words"],
    "additionalProperties": False,
}
WORDS = StructuredOutputsParams(regex="( one two three\\.){6,9}")
NUMBERS = StructuredOutputsParams(regex="(one|two|three) [0-9]{3}( |-)[0-9]{3}")
JSON = StructuredOutputsParams(json=SCHEMA)
CASES = (
    SamplingParams(temperature=0, max_tokens=60, structured_outputs=WORDS),
    SamplingParams(temperature=0.8, seed=1, max_tokens=60, n=3, structured_outputs=JSON),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=40, logprobs=2, structured_outputs=NUMBERS),
    SamplingParams(temperature=0, max_tokens=40, structured_outputs=NUMBERS, bad_words=["two"]),
    SamplingParams(
        temperature=0, max_tokens=60, repetition_penalty=1.2, frequency_penalty=0.4, structured_outputs=JSON
    ),
    SamplingParams(temperature=0.7, seed=3, max_tokens=60, bad_words=["one two", "three"], ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=60, stop=["three. one two three. one"], structured_outputs=WORDS),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=17, prompt_logprobs=1, structured_outputs=JSON),
)
pytestmark = [pytest.mark.slow(seconds=10), pytest.mark.usefixtures("llguidance")]


@pytest.fixture(scope="module")
def llguidance() -> None:
    """The library of grammars."""
    pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demonstration model with its sibling, and with its head."""
    folder = tmp_path_factory.mktemp("guided")
    compile_model(DEMO, folder / "draft.llmc", Options(cache=CACHE, draft=str(SIBLING)))
    compile_model(DEMO, folder / "eagle.llmc", Options(cache=CACHE, draft=f"eagle:{HEAD}", speculate=4))
    return {"draft": folder / "draft.llmc", "eagle": folder / "eagle.llmc"}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step drafts as much as it can."""
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "num_masked_drafts", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", True)


def path_of(artifacts: dict[str, Path], method: str) -> Path:
    """The artifact that has a method."""
    return artifacts["eagle" if method.startswith("eagle") else "draft"]


def run(llm: LLM, cases: tuple[SamplingParams, ...]) -> list[Any]:
    """The outputs of all cases in one batch."""
    outs = llm.generate([REPEAT] * len(cases), list(cases), use_tqdm=False)
    return [
        (o.text, list(o.token_ids), o.finish_reason, o.stop_reason, [sorted(x) for x in o.logprobs or []])
        for r in outs
        for o in r.outputs
    ]


@pytest.fixture(scope="module")
def plain(artifacts: dict[str, Path]) -> dict[str, list[Any]]:
    """The outputs without drafts."""
    found = {}
    for kind, path in artifacts.items():
        with LLM(path, say=lambda text: None) as llm:
            found[kind] = run(llm, CASES)
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["single", "overlap"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens(
    artifacts: dict[str, Path],
    plain: dict[str, list[Any]],
    method: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one batch, and with a cache so small that requests are preempted; with steps that overlap, in which masks come
    after the logits (open steps), and without.
    """
    if overlap:
        defer(monkeypatch)
    want = plain["eagle" if method.startswith("eagle") else "draft"]
    with LLM(path_of(artifacts, method), say=lambda text: None, speculate=method) as llm:
        assert run(llm, CASES) == want
        assert llm.engine.scheduler.pool.num_used == 0
        capacity = llm.engine.executor.capacity
    few = capacity.nbytes // capacity.pages * 16
    with LLM(path_of(artifacts, method), say=lambda text: None, speculate=method, kv_cache_memory_bytes=few) as llm:
        assert run(llm, CASES) == want
        assert llm.stats()["num_preemptions"] > 0
    for text in (one[0] for one in want[1:4]):
        assert text.startswith("{")


def test_a_single_request_looks_up_first(
    artifacts: dict[str, Path], plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that runs alone verifies what prompt lookup finds, with the masks of its grammar: the same tokens,
    also of one that is sampled, whichever of lookup and head drafts."""
    seen, verifies = {"looked up": 0, "head": 0}, Speculation.drafts

    def drafts(self: Speculation, request: Request, room: int) -> int:
        count = verifies(self, request, room)
        seen["looked up" if request.from_lookup else "head"] += count * (request.guide is not None)
        return count

    monkeypatch.setattr(Speculation, "drafts", drafts)
    monkeypatch.setattr(Speculation, "prefers_lookup", lambda self, request: self._alone)
    monkeypatch.setattr(LookupFirst, "num_to_verify", lambda self, request, found, costs, plan: found)
    want = list(plain["eagle"])
    with LLM(artifacts["eagle"], say=lambda text: None, speculate="eagle:4") as llm:
        monkeypatch.setattr(llm.engine, "_grace", 10.0)  # seconds, or masks of a busy machine come too late
        for case in CASES:
            out = run(llm, (case,))
            assert out == want[: len(out)]
            del want[: len(out)]
        assert llm.stats()["spec_decode_num_accepted_tokens"] > 0
    assert not want and all(seen.values()), seen


ROUNDS = 3  # suffix matching learns from the first


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_accepted(artifacts: dict[str, Path], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which all requests have grammars takes fewer steps than tokens, and the texts match the grammar. The
    maximum number of tokens is drafted, independently of the duration of steps, and steps wait for masks."""
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", True)
    cases = (CASES[0], SamplingParams(temperature=0, max_tokens=60, structured_outputs=JSON))
    with LLM(path_of(artifacts, method), say=lambda text: None, speculate=method) as llm:
        monkeypatch.setattr(llm.engine, "_grace", 10.0)  # seconds, or masks of a busy machine come too late
        for _ in range(ROUNDS):
            out = run(llm, cases)
            assert re.fullmatch("( one two three\\.){6,9}", out[0][0])
            assert re.match(r'\{\s*"name"', out[1][0])
            if (stats := llm.stats())["spec_decode_num_accepted_tokens"]:
                break
    assert stats["spec_decode_num_accepted_tokens"] > 0, stats


def test_a_stream_has_the_same_text(artifacts: dict[str, Path], plain: dict[str, list[Any]]) -> None:
    """Several tokens of a grammar arrive in one part."""
    with LLM(artifacts["draft"], say=lambda text: None, speculate="ngram:4") as llm:
        parts = list(llm.stream(REPEAT, CASES[0]))
    assert "".join(part.text for part in parts) == plain["draft"][0][0]
    assert len(parts) < len(plain["draft"][0][1])


@pytest.mark.parametrize("overlap", [False, True], ids=["single", "overlap"])
def test_masks_that_come_late(artifacts: dict[str, Path], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts whose masks have not come are not verified, and tokens that were sampled without their masks, since steps
    overlap, are dropped; the tokens are the same.
    """
    from llmc_runtime.grammar.guide import GrammarGuide

    right = GrammarGuide.masks_ahead
    monkeypatch.setattr(GrammarGuide, "is_looking_ahead", lambda self: False)
    monkeypatch.setattr(GrammarGuide, "masks_ahead", lambda self: right(self)[:1])
    with LLM(artifacts["draft"], say=lambda text: None) as llm:
        want = run(llm, CASES[:4])
    if overlap:
        defer(monkeypatch)
    with LLM(artifacts["draft"], say=lambda text: None, speculate="draft:4") as llm:
        assert run(llm, CASES[:4]) == want
