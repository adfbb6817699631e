"""Prefix caching of models with recurrent layers: tokens are those without it, and snapshots determine the counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import SEED
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.format.manifest import Manifest
from models.test_artifacts import check
from models.test_recurrent_artifacts import artifact, named
from models.test_speculation import eager, quiet, requests, results  # noqa: F401

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
KINDS = (  # and drafts in a step
    ("qwen3_5_text", 4), ("qwen3_next", 4), ("lfm2", 0), ("bamba", 4), ("nemotron_h", 0), ("zamba2", 0),
)  # fmt: skip


def drawn(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    return [rng.integers(3, 320, n).tolist() for n in lengths]


def answer(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Return the tokens after a prompt, and how many of its tokens were cached."""
    out = llm.generate(prompt, params, use_tqdm=False)[0]
    return list(out.outputs[0].token_ids), out.num_cached_tokens


@pytest.mark.parametrize(
    ("name", "speculate"), [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.slow(seconds=12)) for kind in KINDS[1:])]
)
def test_conversations_go_on_from_snapshots(name: str, speculate: int, tmp_path: Path) -> None:
    """Each turn starts with the ones before it, and follows transformers; all full pages before a turn are cached."""
    print(f"seed {SEED}")
    model, out = artifact(named(name), tmp_path, speculate=speculate)
    with LLM(out, say=quiet, speculate="ngram:4" if speculate else None) as llm:
        first, *turns = drawn(37, 11, 20)
        text = first
        assert answer(llm, text)[1] == 0
        for turn in turns:
            reached = (len(text) - 1) // PAGE * PAGE
            text = text + answer(llm, text)[0] + turn
            check(llm, model, [text], 1e-3)
            assert answer(llm, text)[1] == (len(text) - 1) // PAGE * PAGE > reached
        # The beginning that two prompts share has a snapshot once a second one left it there.
        other = [text[:40] + tail for tail in drawn(15, 18, 21)]
        check(llm, model, other[:2], 1e-3)
        assert answer(llm, other[2])[1] == 32
        check(llm, model, other[2:] + other, 1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba"])
def test_company_drafts_and_preemption_change_nothing(name: str, tmp_path: Path) -> None:
    """Twice the same mixture of requests gets the tokens that it gets without prefix caching, also with 3 snapshots."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128, "speculate": 4}
    _, out = artifact(named(name), tmp_path, **limits)
    prompts, params = requests()
    page = Manifest.load((out / "manifest.json").read_bytes()).kv.bytes_per_page
    with LLM(out, say=quiet, enable_prefix_caching=False) as llm:
        want = results(llm, prompts, params)
    for method, snapshots in ((None, None), ("ngram:4", None), ("suffix:4", 3)):
        options: dict[str, Any] = {"speculate": method, "state_snapshots": snapshots}
        with LLM(out, say=quiet, kv_cache_memory_bytes=12 * page, **options) as llm:
            for _ in range(2):
                assert results(llm, prompts, params) == want, method
            stats = llm.stats()
            assert stats["prefix_cache_hits"] > 0 and stats["num_preemptions"] > 0
            assert stats["num_state_snapshots"] <= llm.config.snapshots


@pytest.mark.slow
def test_outputs_of_one_prompt_start_from_one_snapshot(tmp_path: Path) -> None:
    _, out = artifact(named("lfm2"), tmp_path)
    (prompt,) = drawn(70)
    params, found = SamplingParams(n=4, temperature=1.0, max_tokens=5, ignore_eos=True, seed=SEED), []
    for caching in (False, True):
        with LLM(out, say=quiet, enable_prefix_caching=caching) as llm:
            outputs = llm.generate(prompt, params, use_tqdm=False)[0].outputs
            found.append([list(o.token_ids) for o in outputs])
            assert llm.stats()["prefix_cache_hits"] == (3 * 64 if caching else 0)
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_answer_can_be_continued_from_where_it_went(tmp_path: Path) -> None:
    """A request that decodes takes snapshots, too, each in place of its last one."""
    _, out = artifact(named("bamba"), tmp_path, max_model_len=224)
    (prompt,) = drawn(20)
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(out, say=quiet, enable_prefix_caching=False) as llm:
        want, _ = answer(llm, prompt, long)
    with LLM(out, say=quiet) as llm:
        tokens, _ = answer(llm, prompt, long)
        assert tokens == want
        assert answer(llm, prompt + tokens[:130], GREEDY) == (want[130:139], 128)
        assert answer(llm, prompt + tokens[:100])[1] == 16  # of the one after 64 tokens, nothing is left


@pytest.mark.slow
def test_many_prefixes_take_no_more_memory(tmp_path: Path) -> None:
    """A tenant with many prompts evicts its own snapshots first; all of them are bounded."""
    _, out = artifact(named("lfm2"), tmp_path)
    mine, *flood = drawn(40, *[33] * 40)
    with LLM(out, say=quiet, state_snapshots=5) as llm:
        assert llm.config.snapshots == 5
        answer(llm, mine)
        llm.generate([{"prompt_token_ids": p} for p in flood], GREEDY, use_tqdm=False)
        assert llm.stats()["num_state_snapshots"] == 5
        assert answer(llm, flood[-1])[1] == 32 and answer(llm, mine)[1] == 0
        assert llm.reset_prefix_cache() and llm.stats()["num_state_snapshots"] == 0
        assert answer(llm, flood[-1])[1] == 0
