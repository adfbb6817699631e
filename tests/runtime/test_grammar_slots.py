"""Slots of grammar processes: their number, the share of a tenant, and their release."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from llmc_runtime import LlmcError, StructuredOutputsParams
from llmc_runtime.grammar import Grammars, client, host_process, limits, worker_pool

from tests.runtime.followed import Followed
from tests.runtime.test_grammar_processes import END, refused, regex, workers_of
from tests.runtime.test_llm import TOK

pytest.importorskip("llguidance")


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(host_process, "NICE", 0)  # other tests keep the processor busy
    made = Grammars(TOK, TOK.vocab_size, [END])
    yield made
    made.close()


def test_idle_workers_are_kept_up_to_a_number(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_KEPT", 2)
    for i in range(5):
        (guide,) = grammars.wait(grammars.open(regex(f"a{{{i + 1}}}")))
        guide.close()
    end = time.monotonic() + 10
    while len(workers_of(grammars)) > 2 and time.monotonic() < end:
        grammars.pump(0.05)
    assert len(workers_of(grammars)) == 2
    assert len(grammars._grammars) == 2


def test_there_are_no_more_workers_than_allowed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.prepare()
    monkeypatch.setattr(worker_pool, "MAX_PROCESSES", 2)
    monkeypatch.setattr(client, "QUEUE_SECONDS", 0.3)
    first, second = Followed.of(grammars, regex("a+")), Followed.of(grammars, regex("b+"))
    assert refused(grammars, regex("c+")).code == "E653"
    second.guide.close()
    assert Followed.of(grammars, regex("c+")).mask() and first.mask()


def test_one_tenant_does_not_have_all_workers(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.prepare()
    monkeypatch.setattr(worker_pool, "MAX_TENANT_PROCESSES", 2)
    monkeypatch.setattr(client, "QUEUE_SECONDS", 0.3)
    outputs = [grammars.wait(grammars.open(regex(f"a{{{n}}}"), "a")) for n in (1, 2)]
    assert refused(grammars, regex("a{3}"), "a").code == "E653"
    assert grammars.wait(grammars.open(regex("a{3}"), "b"))
    outputs[0][0].close()
    assert grammars.wait(grammars.open(regex("a{3}"), "a"))


def test_outputs_that_fail_before_their_first_token_release_their_workers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar without texts compiles, and has no first mask. Its worker may be replaced by that of another one."""
    grammars.prepare()
    monkeypatch.setattr(worker_pool, "MAX_PROCESSES", 2)
    for name in "bcde":
        cycle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": f"#/$defs/{name}"}, name: {"$ref": "#/$defs/a"}}}
        with pytest.raises(LlmcError) as caught:
            grammars.wait(grammars.open(StructuredOutputsParams(json=cycle), count=2))
        assert caught.value.code == "E652" and "no text matches it" in caught.value.cause
    assert grammars._workers.guides == 0
    assert Followed.of(grammars, regex("a+")).mask()


def test_grammars_of_ended_requests_are_not_compiled(grammars: Grammars) -> None:
    grammars.prepare()
    slow = [grammars.open(StructuredOutputsParams(json={"multipleOf": 524287 + 2 * i}), "a") for i in range(30)]
    shared = grammars.open(regex(), "a")
    for opening in (*slow, grammars.open(regex(), "a")):
        grammars.cancel(opening)
    assert len(grammars._workers._queue) == 1 and not shared.done
    assert len(grammars._grammars) == 1
    assert grammars.wait(shared)


def test_compilations_of_ended_requests_end(grammars: Grammars) -> None:
    """Their processes are killed, and their slots are free for others at once."""
    grammars.prepare()
    definitions = [StructuredOutputsParams(json={"multipleOf": 524287 + 2 * i}) for i in range(3)]
    slow = [grammars.open(definition, "a") for definition in (*definitions[:2], definitions[1])]
    processes = list(grammars._workers._workers)
    assert len(processes) == limits.MAX_TENANT_COMPILATIONS
    for opening in slow[:2]:
        grammars.cancel(opening)
    third = grammars.open(definitions[2], "a")
    assert processes[1] in grammars._workers._workers, "another request waits for this grammar"
    assert len(grammars._workers._queue) == 0, "the third one is being compiled"
    end = time.monotonic() + 10
    while processes[0] in grammars._workers._workers and time.monotonic() < end:
        grammars.pump(0.05)
    assert processes[0] not in grammars._workers._workers
    for opening in (slow[2], third):
        grammars.cancel(opening)
    assert grammars.wait(grammars.open(regex("a+"), "a"))
    assert not grammars._workers._queue._running and not slow[2].done
