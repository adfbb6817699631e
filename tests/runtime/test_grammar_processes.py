"""Grammar processes: shared compilations, limits, failures of one process, and isolation of tenants."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from draw import of_test
from llmc_runtime import LlmcError, SamplingParams, StructuredOutputsParams
from llmc_runtime.engine.engine_loop import EngineLoop
from llmc_runtime.grammar import Grammars, client, grammar_worker, host_process, limits, worker_pool

from tests.runtime.followed import Followed
from tests.runtime.test_llm import TOK, device, make, params, tokenizer

pytest.importorskip("llguidance")
END = TOK.named_id("eos_token") or 0
FORM = "[a-z]{2,5}(-[0-9]{1,3}){1,3}"
SLOW = {"type": "integer", "multipleOf": 524287}  # seconds of CPU time to compile
LARGE = "a?" * 20000 + "a" * 20000  # gigabytes of memory
AMBIGUOUS = 'start: s\ns: s s | /[a-z ]/ | s "," s | '  # ever slower with every token


def regex(text: str = FORM) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(host_process, "NICE", 0)  # other tests keep the processor busy
    made = Grammars(TOK, TOK.vocab_size, [END])
    yield made
    made.close()


def refused(grammars: Grammars, wanted: StructuredOutputsParams, tenant: str = "") -> LlmcError:
    with pytest.raises(LlmcError) as caught:
        grammars.wait(grammars.open(wanted, tenant))
    return caught.value


def host_of(grammars: Grammars) -> psutil.Process:
    """Its host process."""
    assert grammars._workers._host is not None
    return psutil.Process(grammars._workers._host.process.pid)


def workers_of(grammars: Grammars) -> list[psutil.Process]:
    """Its worker processes that have not ended."""
    return [one for one in host_of(grammars).children() if _runs(one)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended since the list was made
        return False


def test_the_vocabulary_is_built_once(grammars: Grammars) -> None:
    assert grammars.prepare() == "" and not workers_of(grammars)
    host = host_of(grammars)
    for text in ("a+", "b+", "a+"):
        assert len(grammars.wait(grammars.open(regex(text), count=3))) == 3
    assert len(workers_of(grammars)) == 2, "one a grammar"
    assert host.is_running()


def test_masks_behind_drafts(grammars: Grammars) -> None:
    """The masks after drafts equal those after the same accepted tokens; a copy of the state follows the drafts."""
    rng = random.Random(of_test())
    for _ in range(20):
        one, plain = Followed.of(grammars, regex()), Followed.of(grammars, regex())
        assert one.mask() == plain.mask()
        while mask := plain.mask():
            drafts, other = [], Followed.of(grammars, regex())
            for token in plain.accepted:
                other.accept(token)
            want = []
            for _ in range(rng.randint(1, 5)):
                if not (after := other.mask()):
                    break
                likely = [i for i in range(TOK.vocab_size) if after[i >> 3] >> (i & 7) & 1 and i != END]
                right = bool(likely) and rng.random() < 0.8
                drafts.append(rng.choice(likely) if right else rng.randrange(TOK.vocab_size))
                if drafts[-1] == END or drafts[-1] not in likely:
                    break
                other.accept(drafts[-1])
                want.append(other.mask())
            assert one.look(drafts) == want
            allowed = [i for i in range(TOK.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
            taken = drafts[: rng.randint(0, len(want))] or [rng.choice(allowed)]
            for token in taken:
                ended = one.accept(token)
                assert plain.accept(token) == ended and one.mask() == plain.mask()
            if len(plain.accepted) > 12:
                break


def test_masks_behind_drafts_have_a_budget(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget there are no masks for drafts, and the output continues."""
    monkeypatch.setattr(grammar_worker, "LOOK_CPU_SECONDS", 0.0)
    monkeypatch.setattr(grammar_worker, "LOOK_TOKEN_CPU_SECONDS", 0.0)
    follower = grammar_worker._Follower(None)
    assert not follower.may_look
    follower.look_seconds = -1.0
    assert follower.may_look
    one = Followed.of(grammars, regex("a{30}"))
    (a,) = TOK.encode("a", add_special_tokens=False)[:1]
    assert one.mask() and len(one.look([a, a])) == 2 and not one.accept(a)


def test_a_process_that_is_busy_gets_its_operations_later(grammars: Grammars) -> None:
    """More operations than its link has room for wait, and none is lost."""
    guides = [Followed.of(grammars, regex("[ab]{40}")) for _ in range(200)]
    (a,) = TOK.encode("a", add_special_tokens=False)[:1]
    for one in guides:
        one.mask()
    for one in guides:
        one.guide.accept(a)
        for _ in range(4):
            one.guide.look_ahead([a, a, a])
    for one in guides:
        assert one.mask()
        while one.guide.is_looking_ahead():
            grammars.pump(0.05)
        assert len(one.guide.masks_ahead()) == 3


def test_a_vocabulary_that_cannot_be_built(tmp_path: Any) -> None:
    made = Grammars(tmp_path, 300, [2])
    assert "tokenizer.json" in made.prepare()
    assert refused(made, regex()).code == "E651"
    made.close()
    assert "lacks" in EngineLoop(make().engine, lambda: None).core.prepare()


def test_tokens_that_the_model_lacks() -> None:
    """A tokenizer may have more tokens than the model, such as a padding token that was added: they are not allowed."""
    larger = tokenizer()
    larger.backend.add_tokens(["padding"])
    added = larger.token_id("padding")
    found = {}
    for rows in (TOK.vocab_size, TOK.vocab_size + 1):
        made = Grammars(larger, rows, [END])
        try:
            mask = Followed.of(made, regex("[a-z]{9}")).mask()
        finally:
            made.close()
        assert len(mask) == -(-rows // 32) * 4
        found[rows] = {i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1}
    assert found[added + 1] - found[added] == {added} and len(found[added]) > 20


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("wanted", "limit"),
    [
        (StructuredOutputsParams(json=SLOW), "needs more than"),  # CPU time or memory, depending on the processor
        (regex(LARGE), "MiB of memory"),
        (StructuredOutputsParams(json={"type": "integer", "multipleOf": 99999989}), "needs more than"),
    ],
)
def test_a_bomb_is_refused_and_remembered_and_others_go_on(
    grammars: Grammars, wanted: StructuredOutputsParams, limit: str
) -> None:
    bomb = grammars.open(wanted, "sender")
    began = time.monotonic()
    grammars.wait(grammars.open(regex(), "other"))
    assert not bomb.done and time.monotonic() - began < limits.COMPILE_CPU_SECONDS
    with pytest.raises(LlmcError) as caught:
        grammars.wait(bomb)
    assert caught.value.code == "E651" and limit in caught.value.cause
    with pytest.raises(LlmcError) as again:
        grammars.open(wanted, "sender")
    assert again.value is caught.value


def test_wrong_grammars_are_refused_in_words(grammars: Grammars) -> None:
    error = refused(grammars, regex("((("))
    assert "regex is refused" in error.cause and error.cause.endswith("unclosed group")
    assert refused(grammars, StructuredOutputsParams(json={"type": "nothing"})).code == "E651"
    assert refused(grammars, StructuredOutputsParams(json="[1]")).code == "E651"
    assert (
        "structural_tag is refused: it is not JSON"
        in refused(grammars, StructuredOutputsParams(structural_tag="<f>")).cause
    )


def test_one_tenant_has_its_lane_and_no_more(grammars: Grammars) -> None:
    """Its expensive grammars occupy one process; requests that wait too long for it get 503."""
    bombs = [grammars.open(StructuredOutputsParams(json={"multipleOf": 524287 + 2 * i}), "a") for i in range(5)]
    for _ in range(3):
        grammars.wait(grammars.open(regex(f"x{{{_ + 1}}}"), "b"))
    assert len(workers_of(grammars)) <= limits.MAX_TENANT_COMPILATIONS + limits.MAX_KEPT
    assert not any(one.done for one in bombs[limits.MAX_TENANT_COMPILATIONS :])


def test_grammars_that_wait_too_long_are_refused_with_a_time_to_retry(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.prepare()
    monkeypatch.setattr(client, "QUEUE_SECONDS", 0.2)
    for i in range(limits.MAX_TENANT_COMPILATIONS):
        grammars.open(StructuredOutputsParams(json={"multipleOf": 524287 + 2 * i}), "a")
    assert refused(grammars, regex(), "a").code == "E653"
    assert grammars.wait(grammars.open(regex(), "b"))


def test_a_compilation_without_a_processor_is_given_up(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "COMPILE_SECONDS", 0.3)
    error = refused(grammars, StructuredOutputsParams(json=SLOW))
    assert error.code == "E653" and "was not compiled within" in error.cause
    assert not workers_of(grammars)


def test_an_output_that_costs_too_much_ends_without_others(grammars: Grammars) -> None:
    """Of two outputs of one grammar the one that goes on and on fails, and the other does not."""
    dear, cheap = (Followed(grammars, one) for one in grammars.wait(grammars.open(_ambiguous(), count=2)))
    letters = TOK.encode("a b c d, e f g " * 40, add_special_tokens=False)
    cheap.accept(letters[0])
    with pytest.raises(LlmcError) as caught:
        for token in letters:
            dear.accept(token)
    assert caught.value.code == "E652" and ("CPU time" in caught.value.cause or "items" in caught.value.cause)
    assert not cheap.accept(letters[1]) and cheap.mask()


def _ambiguous() -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=AMBIGUOUS)


def test_a_killed_worker_ends_only_its_own_outputs(grammars: Grammars) -> None:
    mine, other = Followed.of(grammars, regex()), Followed.of(grammars, regex("a+"))
    before = {one.pid for one in workers_of(grammars)}
    third = Followed.of(grammars, regex("b+"))
    (new,) = {one.pid for one in workers_of(grammars)} - before
    os.kill(new, signal.SIGKILL)
    with pytest.raises(LlmcError) as caught:
        for token in TOK.encode("b" * 500, add_special_tokens=False):
            third.accept(token)
    assert caught.value.code == "E652"
    assert mine.mask() and not other.accept(TOK.encode("a", add_special_tokens=False)[0])
    assert Followed.of(grammars, regex("b+")).mask(), "it is compiled again"


def test_an_output_without_a_processor_is_not_blamed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Followed.of(grammars, regex("b+"))
    (process,) = workers_of(grammars)
    process.suspend()
    monkeypatch.setattr(worker_pool, "OPERATION_SECONDS", 0.2)
    with pytest.raises(LlmcError) as caught:
        mine.accept(TOK.encode("b", add_special_tokens=False)[0])
    assert caught.value.code == "E653" and "too little CPU time" in caught.value.cause
    assert not workers_of(grammars)


def test_a_host_that_is_killed_is_replaced(grammars: Grammars) -> None:
    mine = Followed.of(grammars, regex("a+"))
    host = host_of(grammars)
    children = host.children()
    host.kill()
    with pytest.raises(LlmcError) as caught:
        for token in TOK.encode("a" * 500, add_special_tokens=False):
            mine.accept(token)
            time.sleep(0.01)
    assert caught.value.code in ("E652", "E653")
    psutil.wait_procs(children, timeout=10)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            assert Followed.of(grammars, regex("a+")).mask()
            return
        except LlmcError as e:
            assert e.code == "E653"
    raise AssertionError("no host came back")


def test_everything_ends_with_the_engine() -> None:
    made = Grammars(TOK, TOK.vocab_size, [END])
    Followed.of(made, regex())
    children = [host_of(made), *workers_of(made)]
    made.close()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone and not alive
    with pytest.raises(LlmcError) as caught:
        made.open(regex())
    assert caught.value.code == "E608"


def structured(wanted: StructuredOutputsParams, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80, "seed": 3, "structured_outputs": wanted} | more)


@pytest.mark.parametrize("depth", [1, 2])
def test_others_run_while_a_grammar_is_compiled(depth: int) -> None:
    """Through LLM, from two threads: the one with an expensive grammar fails after the other has ended."""
    llm, ended = make(device(depth)), threading.Event()
    errors: list[LlmcError] = []

    def bomb() -> None:
        try:
            llm.generate("x", structured(StructuredOutputsParams(json=SLOW)), use_tqdm=False)
        except LlmcError as e:
            errors.append(e)
        ended.set()

    thread = threading.Thread(target=bomb)
    thread.start()
    for _ in range(5):
        assert len(llm.generate("The kernel", params(9), use_tqdm=False)[0].outputs[0].token_ids) == 9
    assert not ended.is_set()
    thread.join(60)
    assert errors and errors[0].code == "E651"
    llm.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_ambiguous_grammar_ends_its_own_request(depth: int) -> None:
    """Its masks are late; the tokens of other requests do not change; finally it ends with an error."""
    want = make().generate("The kernel", params(60), use_tqdm=False)[0].outputs[0]
    llm = make(device(depth))
    kinds = [structured(_ambiguous(), allowed_token_ids=_letters(), temperature=1.0), params(60)]
    streams = [llm.stream("x", kinds[0]), llm.stream("The kernel", kinds[1])]
    assert "".join(piece.text for piece in streams[1]) == want.text
    try:
        for _ in streams[0]:
            pass
    except LlmcError as e:
        assert e.code == "E652"
    assert len(llm.generate("The kernel", params(9), use_tqdm=False)[0].outputs[0].token_ids) == 9
    llm.close()


def _letters() -> list[int]:
    """Single letters and commas, so that the text goes on."""
    return sorted({TOK.encode(c, add_special_tokens=False)[0] for c in "abcdefg ,"})
