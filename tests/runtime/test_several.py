"""Several outputs of one prompt: seeds, indices, one computation of the prompt, and an end for all."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from draw import of_test
from llmc_runtime import SamplingParams
from llmc_runtime.engine.input_processor import params_of_output
from llmc_runtime.sched import request_init
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.token_guide import mask_of

from llmc.ir.ops.sample import exponentials
from tests.runtime.oracle import Expected
from tests.runtime.rig import Rig
from tests.runtime.test_llm import device, make

TEXT = "The kernel of a matrix is what it takes to zero"


def several(n: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"n": n, "max_tokens": 6, "ignore_eos": True, "seed": 40} | more)


def test_output_i_is_that_of_seed_plus_i() -> None:
    (got,) = make().generate(TEXT, several(4), use_tqdm=False)
    assert [o.index for o in got.outputs] == [0, 1, 2, 3] and got.finished
    for i, output in enumerate(got.outputs):
        alone = make().generate(TEXT, several(1, seed=40 + i), use_tqdm=False)[0].outputs[0]
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
    assert len({tuple(o.token_ids) for o in got.outputs}) == 4


def test_draws_of_neighbours_are_independent() -> None:
    """Chi-square of pairs of random variables: seeds that follow each other at one position, positions under one seed,
    ids of one draw; 99 degrees of freedom, and a bound that fails by chance once in a hundred million."""
    rng = random.Random(of_test())
    for seed, position, id in ((1, 0, 0), (0, 1, 0), (1, 1, 0), (2**32, 0, 0), (0, 7, 0), (0, 0, 1), (0, 1, 1)):
        at, here, first = rng.randrange(2**64), rng.randrange(1000), rng.randrange(100_000)
        draws = [
            math.exp(-float(exponentials(at + seed * i & 2**64 - 1, here + position * i, first + id * i)))
            for i in range(20_000)
        ]
        counts = [0] * 100
        for one, other in zip(draws[::2], draws[1::2]):
            counts[int(one * 10) * 10 + int(other * 10)] += 1
        assert sum((count - 100) ** 2 / 100 for count in counts) < 200, (at, here, first, seed, position, id)


def test_seeds_wrap_and_none_is_drawn_for_each() -> None:
    assert [params_of_output(several(3, seed=-2), i).seed for i in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert [params_of_output(several(3, seed=None), i).seed for i in range(3)] == [None] * 3
    (got,) = make().generate(TEXT, several(3, seed=None), use_tqdm=False)
    assert len({tuple(o.token_ids) for o in got.outputs}) == 3


def test_shared_parameters_of_outputs_are_checked_and_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 outputs under 65,536 allowed ids held the engine for seconds."""
    made: list[object] = []
    monkeypatch.setattr(request_init, "mask_of", lambda ids, vocab: made.append(ids) or mask_of(ids, vocab))
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: made.append(params) or check(params))
    rng = random.Random(of_test())
    ids = tuple(sorted(rng.sample(range(400), 90)))
    words = [[rng.choice(ids) for _ in range(3)] for _ in range(20)] + [[rng.choice(ids)]]
    params = several(8, allowed_token_ids=ids, max_tokens=30)
    made.clear()
    rig = Rig(1, max_num_seqs=16)
    requests: list[Request] = []
    for i in range(8):
        leader = requests[0] if i else None
        requests.append(Request(f"r{i}", [1, 2], params_of_output(params, i), bad_words=words, leader=leader))
        rig.engine.add(requests[-1])
        rig.expected[f"r{i}"] = Expected(requests[-1], rig.config)
    assert made == [None, ids]
    rig.drain()  # each token as it has to be
    assert len({tuple(r.output_token_ids) for r in requests}) == 8
    other = Request(
        "o", [1, 2], several(1, allowed_token_ids=[5, 6], max_tokens=3), bad_words=words, leader=requests[0]
    )
    rig.engine.add(other)  # a leader of other bans shares none
    while rig.engine.has_work():
        rig.engine.step()
    assert set(other.output_token_ids) <= {5, 6}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prompt", [3, 4, 5, 41, 90])
def test_the_prompt_is_computed_once(depth: int, prompt: int) -> None:
    """Every output except the leader computes only the tokens after the last full page."""
    rig = Rig(depth)
    ids = [(7 * i) % 1000 for i in range(prompt)]
    requests: list[Request] = []
    for i in range(4):
        leader = requests[0] if i else None
        requests.append(Request(f"r{i}", ids, SamplingParams(max_tokens=3, ignore_eos=True, seed=i), leader=leader))
        rig.engine.add(requests[-1])
    while rig.engine.has_work():
        rig.engine.step()
    work = sum(w.num_tokens for plan in rig.plans for w in plan.work)
    shared = (prompt - 1) // 4 * 4
    for r in requests[1:]:  # nor are the pages hashed again
        assert all(a is b for a, b in zip(requests[0].chain[1 : 1 + shared // 4], r.chain[1:]))
    assert all(len(r.chain) > shared // 4 for r in requests)
    assert work == 4 * (prompt + 2) - 3 * shared
    assert [r.num_cached for r in requests] == [0, shared, shared, shared]


def test_an_aborted_leader_does_not_delay_the_others() -> None:
    rig = Rig(2)
    leader = Request("a", [1] * 90, SamplingParams(max_tokens=3))
    other = Request("b", [1] * 90, SamplingParams(max_tokens=3, ignore_eos=True), leader=leader)
    rig.engine.add(leader)
    rig.engine.add(other)
    rig.engine.step()
    rig.engine.abort("a")
    while rig.engine.has_work():
        rig.engine.step()
    assert len(other.output_token_ids) == 3


def test_a_stream_tells_pieces_of_all_and_closing_it_ends_all() -> None:
    (want,) = make().generate(TEXT, several(3), use_tqdm=False)
    pieces = list(make().stream(TEXT, several(3)))
    for i, output in enumerate(want.outputs):
        mine = [p for p in pieces if p.index == i]
        assert "".join(p.text for p in mine) == output.text
        assert [t for p in mine for t in p.token_ids] == output.token_ids
        assert [p.finish_reason for p in mine] == [None] * (len(mine) - 1) + ["length"]
    llm = make(device(2))
    stream = llm.stream(TEXT, several(3, max_tokens=40))
    next(stream)
    stream.close()
    assert not llm.engine.has_work() and list(stream) == []
    assert {o.finish_reason for o in stream.output.outputs} == {"abort"}


def test_a_request_of_which_one_output_cannot_run_runs_none() -> None:
    llm = make()
    with pytest.raises(Exception, match="E603"):
        llm.generate(TEXT, several(3, max_tokens=1000), use_tqdm=False)
    assert not llm.engine.has_work()


def test_stop_strings_end_one_output_and_not_the_others() -> None:
    (free,) = make().generate(TEXT, several(3, max_tokens=12), use_tqdm=False)
    stop = free.outputs[1].text[-2:]
    (got,) = make().generate(TEXT, several(3, max_tokens=12, stop=[stop]), use_tqdm=False)
    for before, after in zip(free.outputs, got.outputs):
        cut = before.text.find(stop)
        assert after.text == (before.text if cut < 0 else before.text[:cut])
        assert after.finish_reason == ("length" if cut < 0 else "stop")
