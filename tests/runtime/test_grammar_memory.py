"""The memory of grammar processes: what counts as theirs, and the limit of a tenant."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from llmc_runtime import LlmcError, StructuredOutputsParams
from llmc_runtime.grammar import Grammars, grammar_worker, limits, wire, worker_pool

from tests.runtime.followed import Followed
from tests.runtime.test_grammar_processes import END, regex, workers_of
from tests.runtime.test_llm import TOK


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOK, TOK.vocab_size, [END])
    yield made
    made.close()


def started(grammars: Grammars, wanted: StructuredOutputsParams, tenant: str) -> Followed:
    """Start an output of a tenant."""
    (guide,) = grammars.wait(grammars.open(wanted, tenant))
    return Followed(grammars, guide)


def test_the_memory_of_a_tenant_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "FREE_BYTES", 0)
    monkeypatch.setattr(worker_pool, "TENANT_BYTES", 0)
    with pytest.raises(LlmcError) as caught:
        grammars.wait(grammars.open(regex("a+")))
    assert caught.value.code == "E653" and "memory" in caught.value.cause
    monkeypatch.setattr(worker_pool, "TENANT_BYTES", 1 << 30)
    assert Followed.of(grammars, regex("a+")).mask()


def test_the_memory_of_the_vocabulary_is_not_counted(grammars: Grammars) -> None:
    """A process counts the memory that it has allocated itself: that of a large vocabulary is the host's, and would
    leave room for a few grammars only."""
    Followed.of(grammars, regex("a+"))
    (process,) = workers_of(grammars)
    (worker,) = grammars._workers._workers.values()
    assert process.memory_info().rss - process.memory_info().shared > 12 << 20
    assert 0 < worker.private < 8 << 20


def test_a_process_reports_that_its_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports what it has allocated itself, once that has grown by GROWTH_BYTES."""
    resident = [100 << 20]
    monkeypatch.setattr(grammar_worker, "_resident_bytes", lambda: resident[0])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    reports = []
    with ours, theirs:
        worker = grammar_worker.Worker(ours, None, 8)
        for grown in (
            0,
            limits.GROWTH_BYTES - 1,
            limits.GROWTH_BYTES,
            limits.GROWTH_BYTES + 1,
            5 * limits.GROWTH_BYTES,
        ):
            resident[0] = (100 << 20) + grown
            for _ in range(limits.MEASURED_OPERATIONS):
                worker._report_growth()
        for _ in range(2):
            data = theirs.recv(wire.MAX_DATAGRAM_BYTES)
            assert wire.RESULT.unpack_from(data) == (0, wire.GREW, 0)
            reports.append(int(data[wire.RESULT.size :]))
        with pytest.raises(BlockingIOError):
            theirs.recv(wire.MAX_DATAGRAM_BYTES)
    assert reports == [limits.GROWTH_BYTES, 5 * limits.GROWTH_BYTES]


def grow(grammars: Grammars, tenant: str, private_bytes: int) -> None:
    """Let the process of a tenant's only grammar report its memory."""
    (worker,) = [w for w in grammars._workers._workers.values() if w.grammar.tenant == tenant]
    grammars._workers._handle_result(worker, (0, wire.GREW, 0), str(private_bytes).encode())


def until_ended(grammars: Grammars, count: int) -> None:
    """Wait until only this many processes are left."""
    end = time.monotonic() + 10
    while len(workers_of(grammars)) > count and time.monotonic() < end:
        grammars.pump(0.05)
    assert len(workers_of(grammars)) == len(grammars._workers._workers) == count


def test_the_memory_of_a_tenant_is_bounded_while_it_grows(grammars: Grammars) -> None:
    """The process that exceeds a tenant's limit ends with its outputs; those of others continue."""
    mine, other = started(grammars, regex("a+"), "mine"), started(grammars, regex("a+"), "other")
    letter = TOK.encode("a", add_special_tokens=False)[0]
    grow(grammars, "other", limits.TENANT_BYTES)
    grow(grammars, "mine", limits.TENANT_BYTES)
    assert not mine.accept(letter), "each tenant has its own limit"
    grow(grammars, "mine", limits.TENANT_BYTES + 1)
    with pytest.raises(LlmcError) as caught:
        mine.accept(letter)
    assert caught.value.code == "E653" and "memory" in caught.value.cause
    assert not other.accept(letter) and other.mask()
    again = started(grammars, regex("a+"), "mine")
    assert again.mask(), "it is compiled again"
    until_ended(grammars, 2)
    assert grammars._workers.guides == 2
    assert len(grammars._grammars) == 2 and not again.accept(letter)


def test_idle_processes_give_way_to_the_memory_of_others(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "TENANT_BYTES", 40 << 20)
    idle = started(grammars, regex("b+"), "mine")
    grow(grammars, "mine", 30 << 20)
    idle.guide.close()
    mine = started(grammars, regex("a+"), "mine")
    (worker,) = [w for w in grammars._workers._workers.values() if w.guides]
    grammars._workers._handle_result(worker, (0, wire.GREW, 0), str(20 << 20).encode())
    until_ended(grammars, 1)
    assert mine.mask()


def test_many_grammars_of_a_tenant_stay_within_its_memory() -> None:
    """Those of up to FREE_BYTES are never refused, however many there are."""
    assert limits.FREE_BYTES * limits.MAX_TENANT_PROCESSES <= limits.TENANT_BYTES


def test_an_idle_process_that_has_grown_is_not_kept(grammars: Grammars) -> None:
    """Of a grammar whose outputs have ended, the process stays only if it is small."""
    mine = started(grammars, regex("a+"), "mine")
    mine.guide.close()
    grow(grammars, "mine", limits.KEPT_BYTES)
    grammars.pump(0.05)
    assert len(workers_of(grammars)) == 1
    grow(grammars, "mine", limits.KEPT_BYTES + 1)
    until_ended(grammars, 0)
    assert not grammars._grammars
