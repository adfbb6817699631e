"""Types of arguments that LLM accepts, such as arrays for lists, and its defaults."""

from __future__ import annotations

import numpy as np
import pytest
from llmc_runtime import LlmcError
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.test_llm import LENGTH, make, params, tokenizer


def test_arrays_mean_what_their_lists_mean() -> None:
    for given, ids in (
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        ([[np.int64(5)], np.array([6, 7], np.uint8), (8,)], [[5], [6, 7], [8]]),
        (np.array([], np.int64), []),
    ):
        outputs = make().generate(given, params(1), use_tqdm=False)
        assert [o.prompt_token_ids for o in outputs] == ids
    assert [o.prompt for o in make().generate(np.array(["a", "b"]), params(1), use_tqdm=False)] == ["a", "b"]


def test_candidates_are_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, requests = make(tok=tokenizer()), []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], **how: bool) -> str:
        requests.append(tuple(ids))
        return decode(self, ids, **how)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    for _ in range(2):
        rows = llm.generate("a b", params(8, logprobs=3), use_tqdm=False)[0].outputs[0].logprobs
        assert {(i,) for row in rows or () for i in row} == set(requests)
    assert len(requests) == len(set(requests))


def test_defaults_are_cut_to_what_fits_and_requests_are_not() -> None:
    llm = make(generation={"max_new_tokens": 1000})
    long = [5] * (LENGTH - 3)
    assert len(llm.generate(long, use_tqdm=False)[0].outputs[0].token_ids) == 3
    assert len([t for p in llm.stream(long) for t in p.token_ids]) == 3
    assert llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)[0].finished
    assert len(make().generate(long, use_tqdm=False)[0].outputs[0].token_ids) == 3
    with pytest.raises(LlmcError, match="E603"):
        llm.generate(long, params(4), use_tqdm=False)
    with pytest.raises(LlmcError, match="E602"):
        llm.generate(long * 2, use_tqdm=False)
