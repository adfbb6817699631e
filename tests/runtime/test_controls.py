"""Masks, biases and guides of requests, by themselves and in the scheduler's steps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draw import of_test
from llmc_runtime import LlmcError, SamplingParams
from llmc_runtime.device.device import Memory
from llmc_runtime.engine.core import EngineCore
from llmc_runtime.engine.input_processor import EngineRequest, bad_word_ids
from llmc_runtime.exec.device_rows import Rows
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import RowInit, RowParams
from llmc_runtime.sched.token_guide import Banned, Bans, both, empty, mask_of, without_ids

from tests.runtime.guides import Wandering, bits
from tests.runtime.rig import Rig
from tests.runtime.test_llm import TOK, make, params


def ids_of(mask: bytes) -> set[int]:
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 32, 33, 320, 1001])
def test_masks(vocab: int) -> None:
    rng = random.Random(of_test())
    some, other = ({i for i in range(vocab) if rng.random() < 0.5} for _ in range(2))
    a, b = mask_of(some, vocab), mask_of(other, vocab)
    assert a == bits(some, vocab) and len(a) == -(-vocab // 32) * 4
    assert ids_of(mask_of(None, vocab)) == set(range(vocab))
    assert ids_of(without_ids(a, other)) == some - other and ids_of(both(a, b)) == some & other
    assert empty(a) == (not some)


def test_a_banned_sequence_needs_its_beginning() -> None:
    whole = mask_of(None, 50)
    guide = Banned(Bans(whole, [[4, 5, 6], [5, 7]], whole))
    result = []
    for token in (4, 5, 6, 5, 4, 4, 5):
        assert not guide.accept(token)
        result.append(sorted(set(range(50)) - ids_of(guide.mask())))
    assert result == [[], [6, 7], [], [7], [], [], [6, 7]]


@pytest.mark.parametrize("lists_ids", [False, True])
def test_bans_are_the_same_with_and_without_operations_on_whole_masks(lists_ids: bool) -> None:
    """Bans on their own and within a grammar's mask equal those of sets, also where they leave no needed id."""
    rng, ended = random.Random(of_test()), 0
    for _ in range(300):
        vocab = rng.randint(6, 40)
        allowed = set(rng.sample(range(vocab), rng.randint(1, vocab))) if lists_ids else set(range(vocab))
        needed = set(range(vocab)) - (set(rng.sample(range(vocab), 2)) if rng.random() < 0.5 else set())
        words = [rng.choices(range(min(vocab, 8)), k=rng.randint(1, 3)) for _ in range(rng.randint(0, 12))]
        bans = Bans(bits(allowed, vocab), words, bits(needed, vocab), allows_all=not lists_ids)
        past = rng.choices(range(8), k=4)
        banned = {w[-1] for w in words if len(w) == 1 or past[-len(w) + 1 :] == w[:-1]}
        rest, start = allowed - banned, allowed - {w[-1] for w in words if len(w) == 1}
        assert bans.leave_none == (not start & needed)
        inner = set(rng.sample(range(vocab), rng.randint(1, 4)))
        last = past[-bans.window :] if bans.window else []
        if not bans.leave_none:
            assert bans.after(last) == (bits(rest, vocab) if rest & needed else None)
        want = bits(rest & inner, vocab) if rest & inner & needed else None
        assert bans.within(bits(inner, vocab), last) == want
        ended += want is None
    assert ended, "no case excludes all ids"


def test_bans_behind_drafts() -> None:
    """The bans after drafts equal those after the same accepted tokens, up to the first banned draft."""
    whole, rng = mask_of(None, 8), random.Random(of_test())
    for _ in range(300):
        words = [rng.choices(range(8), k=rng.randint(1, 3)) for _ in range(5)]
        bans = Bans(whole, words, whole)
        guide, plain = Banned(bans), Banned(bans)
        for _ in range(12):
            drafts = rng.choices(range(8), k=4)
            guide.look_ahead(drafts)
            ahead, other = list(guide.masks_ahead()), Banned(bans)
            other._past = list(plain._past)
            for index in range(len(drafts)):
                if drafts[index] not in ids_of(other.mask() or b""):
                    assert len(ahead) == index
                    break
                other.accept(drafts[index])
                assert ahead[index] == other.mask()
            for token in drafts[: rng.randint(0, len(ahead))] + rng.choices(range(8)):
                guide.accept(token)
                plain.accept(token)
                assert guide.mask() == plain.mask()


def test_a_request_whose_every_token_is_banned_ends_without_others() -> None:
    rig = Rig()
    rig.add("other", 9, max_tokens=12)
    request = Request("stuck", [1, 2], SamplingParams(max_tokens=9, allowed_token_ids=[5]), bad_words=[[5, 5, 5]])
    rig.engine.add(request)
    errors, others = [], 0
    while rig.engine.has_work():
        for delta in rig.engine.step():
            others += delta.id == "other"
            errors += [delta.error] if delta.error is not None else []
    assert [e.code for e in errors] == ["E610"] and request.output_token_ids == [5, 5] and others == 12
    assert rig.engine.error is None and rig.engine.counters.request_success["error"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {1000: 1}}, []),
        ({"allowed_token_ids": [3, 1000]}, []),
        ({"bad_words": ["x"]}, [[1000]]),
        ({"bad_words": ["x"]}, [[]]),
        ({"allowed_token_ids": [3]}, [[3]]),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, []),
    ],
)
def test_ids_are_those_of_the_vocabulary_and_one_stays(fields: dict[str, Any], words: list[list[int]]) -> None:
    rig = Rig()
    with pytest.raises(LlmcError) as caught:
        rig.engine.add(Request("x", [1], SamplingParams(**fields), bad_words=words))
    assert caught.value.code == "E601" and not rig.engine.has_work()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_with_a_guided_token_under_way_waits_for_its_masks(depth: int) -> None:
    rig = Rig(depth)
    rig.add("plain", 5, max_tokens=30)
    rig.step()
    assert len(rig.scheduler._in_flight) == depth - 1
    guided = Request("guided", [1] * 40, SamplingParams(max_tokens=6, ignore_eos=True), guide=Wandering(1000))
    rig.engine.add(guided)
    launch, guide = rig.launch, rig.guide
    result: list[str] = []

    def has(step: Any, planned: list[Request]) -> bool:
        return any(r is guided and w.emit for r, w in zip(planned, step.work))

    def launched(step: Any) -> Any:
        *earlier, (_, planned) = rig.scheduler._in_flight
        assert not any(s.open for s, _ in earlier)
        late = any(has(s, them) for s, them in earlier)
        assert step.open == (late and has(step, planned)) and len(step.masks) == (has(step, planned) and not late)
        result.extend(["open" if step.open else "masked"] * has(step, planned))
        return launch(step)

    def guided_by(ticket: Any, masks: Any) -> None:
        assert len(rig.scheduler._in_flight) == len(masks) == 1
        result.append("guided")
        guide(ticket, masks)

    rig.launch, rig.guide = launched, guided_by  # type: ignore[method-assign]
    while rig.engine.has_work():
        rig.engine.step()
    count = len(guided.output_token_ids)
    expected = ["masked"] + ["open", "guided"] * (count - 1) if depth > 1 else ["masked"] * count
    assert result[: 2 * count - 1] == expected


def test_a_fixed_mask_holds_nothing_up() -> None:
    rig = Rig(2)
    request = rig.add("a", 5, max_tokens=9, allowed_token_ids=range(100, 164), logit_bias={3: 1.0})
    while rig.engine.has_work():
        rig.step()
        assert request.status == 4 or len(rig.scheduler._in_flight) == 1 or request.num_total == request.limit
    assert set(request.output_token_ids) <= set(range(100, 164)) and not any(plan.masks for plan in rig.plans)
    assert request.row_params.ints(5)[6:] == [1, 1]


def test_bad_words_are_tokens_with_and_without_a_space() -> None:
    for word in ("kernel", "a", "of the", " matrix"):
        bare = TOK.encode(word.lstrip(), add_special_tokens=False)
        spaced = TOK.encode(" " + word.lstrip(), add_special_tokens=False)
        want = [bare] + ([spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [])
        assert bad_word_ids(TOK, [word]) == want


def test_many_bad_words_are_tokenized_like_single_ones() -> None:
    rng = random.Random(of_test())
    words = ["".join(rng.choices("abc éß東🙂", k=rng.randint(1, 40))) for _ in range(300)]
    assert bad_word_ids(TOK, words) == [ids for word in words for ids in bad_word_ids(TOK, [word])]
    with pytest.raises(LlmcError, match="E621"):
        bad_word_ids(TOK, [*words, "\ud800"])


def test_outputs_share_the_biases_of_their_request() -> None:
    rig = Rig(1, max_num_seqs=8)
    core = EngineCore(rig.engine, lambda: None)
    biases = [{5: 1.0, 3: -2.0}, {7: 0.5}]
    for first, bias in zip((0, 4), biases):
        wanted = SamplingParams(n=4, max_tokens=2, temperature=1.0, seed=1, logit_bias=bias)
        core.submit(EngineRequest(first, Prompt([1, 2, 3]), wanted))
    rows = [rig.scheduler.requests[str(i)].row_params for i in range(8)]
    assert [row.biases for row in rows] == [((3, -2.0), (5, 1.0))] * 4 + [((7, 0.5),)] * 4
    assert len({id(row.biases) for row in rows}) == 2
    top = rig.scheduler.config.vocab_size
    with pytest.raises(LlmcError, match="E601"):
        core.submit(EngineRequest(8, Prompt([1]), SamplingParams(n=4, temperature=1.0, logit_bias={top: 1.0})))
    assert len(rig.scheduler.requests) == 8


class HostDevice:
    """A device whose memory is the host's."""

    def write(self, memory: Memory, at: int, values: np.ndarray) -> None:
        memory.host[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)


def rows_of(**widths: int) -> tuple[Rows, dict[str, np.ndarray]]:
    """Return four rows with states of these widths, besides those that each model has, and the states as arrays."""
    states, arrays = {}, {}
    for role, width in {"tokens": 8, "length": 1, "pages": 4, **widths}.items():
        memory = Memory(0, 16 * width, np.full(16 * width, 0xAB, np.uint8))
        kind = "f32" if role == "biases" else "i32"
        states[role] = SimpleNamespace(dtype=kind, shape=[lambda env: 4]), memory
        arrays[role] = memory.host.view(np.float32 if kind == "f32" else np.int32).reshape(4, width)
    return Rows(HostDevice(), states, {}, 64), arrays  # type: ignore[arg-type]


def test_rows_have_the_biases_of_their_own_request() -> None:
    rows, arrays = rows_of(bias_ids=6, biases=6)
    shared, other = ((3, -2.0), (5, 1.0)), ((7, 0.5),)
    wanted = {0: shared, 1: shared, 2: other, 3: shared}
    for row, biases in wanted.items():
        rows.init(RowInit(row, [1], 0, 1, RowParams(biases=biases), [0]))
    for row, biases in wanted.items():
        ids, values = arrays["bias_ids"][row], arrays["biases"][row]
        assert tuple(zip(ids[: len(biases)].tolist(), values[: len(biases)].tolist())) == biases


def test_rows_have_the_tokens_of_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that share the list of a prompt have the same tokens and bitmap, which are made once."""
    rows, arrays = rows_of(seen=2)
    prompt, other = [3, 40, 3], [5, 33]
    made, asarray = list[object](), np.asarray
    monkeypatch.setattr(np, "asarray", lambda x, *how: made.append(x) or asarray(x, *how))  # type: ignore[func-returns-value]
    wanted = {0: (prompt, 3), 1: (prompt, 3), 2: ([*other, 40], 2), 3: (prompt, 3)}
    for row, (tokens, num_prompt) in wanted.items():
        rows.init(RowInit(row, tokens, 0, num_prompt, RowParams(), [0]))
    assert sum(x is prompt for x in made) == 2, "rows 0 and 1 come one after the other"
    monkeypatch.undo()
    for row, (tokens, num_prompt) in wanted.items():
        assert arrays["tokens"][row, : len(tokens)].tolist() == tokens
        words = arrays["seen"].view(np.uint32)[row]
        seen = {i for i in range(64) if int(words[i // 32]) >> i % 32 & 1}
        assert seen == set(tokens[:num_prompt])
    rows.init(RowInit(0, prompt, 0, 1, RowParams(), [0]))
    assert arrays["seen"][0].tolist() == [1 << 3, 0], "the same list with a shorter prompt"


def test_bad_words_are_not_generated() -> None:
    free = make().generate("The kernel", params(24), use_tqdm=False)[0].outputs[0]
    words = sorted({TOK.decode([t]).strip() for t in free.token_ids} - {""})[:20]
    assert words
    banned = {tuple(s) for s in bad_word_ids(TOK, words)}
    token_ids = make().generate("The kernel", params(24, bad_words=words), use_tqdm=False)[0].outputs[0].token_ids
    runs = {tuple(token_ids[i : i + n]) for n in {len(s) for s in banned} for i in range(len(token_ids) - n + 1)}
    assert len(token_ids) == 24 and not runs & banned


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(LlmcError) as caught:
        make(tok=None).generate([[1, 2]], params(3, bad_words=["x"]), use_tqdm=False)
    assert caught.value.code == "E620" and "bad_words" in caught.value.cause


def stopped_at(texts: list[str], stops: list[str], low: int, include: bool) -> tuple[str, str | None, int]:
    """Return an output's (text, stop string, tokens), found character by character in its text after each token."""
    whole, gate = texts[-1], len(texts[low - 1]) if low else 0
    for end in range(gate + 1, len(whole) + 1):
        found = [s for s in stops if whole[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            count = next(i for i, text in enumerate(texts, 1) if len(text) >= end)
            return whole[: end if include else end - len(stop)], stop, count
    return whole, None, len(texts)


def test_stop_strings_across_tokens_are_those_of_the_whole_text() -> None:
    """Stop strings cut from the text anywhere, with min_tokens, kept or not, from a list and from a stream."""
    rng = random.Random(of_test())
    seed = rng.randrange(1 << 30)
    print(f"seed {seed}")
    rng.seed(seed)
    grown, texts = "", []
    for piece in make().stream("The kernel of a matrix", params(24)):
        grown += piece.text
        texts.append(grown)
    assert len(texts) == 24
    for _ in range(40):
        starts = [rng.randrange(len(grown)) for _ in range(rng.randint(1, 4))]
        stops = [grown[at : at + rng.randint(1, 9)] for at in starts]
        low, include = rng.choice((0, 0, 5, 20)), rng.random() < 0.4
        requested = params(24, stop=stops, min_tokens=low, include_stop_str_in_output=include)
        text, stop, count = stopped_at(texts, stops, low, include)
        (one,) = make().generate("The kernel of a matrix", requested, use_tqdm=False)[0].outputs
        assert (one.text, one.stop_reason, len(one.token_ids)) == (text, stop, count), (stops, low, include)
        assert one.finish_reason == ("length" if stop is None else "stop")
        assert "".join(p.text for p in make().stream("The kernel of a matrix", requested)) == text


def test_min_tokens_masks_stop_ids_and_end_tokens() -> None:
    """Also those of a request that ignores the model's own, as in vLLM; afterwards they end it."""
    rig = Rig(eos_token_ids=(7,))
    stops = list(range(100, 120))
    for name, ignore in (("a", False), ("b", True)):
        request = rig.add(name, 9, max_tokens=40, min_tokens=30, stop_token_ids=stops, ignore_eos=ignore)
        assert request.row_params.stops == (7, *stops) and request.eos == (set() if ignore else {7})
    rig.drain()


def test_without_detokenizing_there_is_no_text() -> None:
    requested = params(5, detokenize=False, logprobs=1, prompt_logprobs=0)
    (output,) = make().generate("The kernel", requested, use_tqdm=False)
    (one,) = output.outputs
    assert one.text == "" and len(one.token_ids) == 5 and output.prompt_logprobs is not None
    rows = [*(one.logprobs or []), *output.prompt_logprobs[1:]]
    assert rows and all(found.decoded_token is None for row in rows if row for found in row.values())
