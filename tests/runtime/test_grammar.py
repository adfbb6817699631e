"""Structured outputs on the simulated device, through LLM: steps under way, streams, ends, closed LLMs."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from llmc_runtime import LlmcError, SamplingParams, StructuredOutputsParams

from tests.runtime.test_llm import TOK, device, make, params

pytest.importorskip("llguidance")
FORM = "[a-z]{2,5}(-[0-9]{1,3}){1,3}"


def structured(form: str = FORM, **more: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(regex=form)
    return SamplingParams(**{"max_tokens": 40, "seed": 3, "structured_outputs": wanted} | more)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_texts_have_their_form_whatever_is_under_way(depth: int) -> None:
    requests = ["The kernel", "A matrix", "x", [5, 6, 7], "more", "and more"]
    kinds = [structured(), params(12), structured(n=3), params(30), structured(temperature=0.0), params(3)]
    outputs = make(device(depth)).generate(requests, kinds, use_tqdm=False)
    for prompt, kind, output in zip(requests, kinds, outputs):
        for one in output.outputs:
            if kind.structured_outputs is None:
                alone = make().generate([prompt], kind, use_tqdm=False)[0].outputs[0]
                assert (one.token_ids, one.text) == (alone.token_ids, alone.text)
            else:
                assert one.finish_reason == "stop" and one.stop_reason is None
                assert re.fullmatch(FORM, one.text), one.text


def test_a_stream_has_the_text_of_the_whole() -> None:
    want = make().generate("x", structured(), use_tqdm=False)[0].outputs[0]
    pieces = list(make(device(2)).stream("x", structured()))
    assert "".join(p.text for p in pieces) == want.text and pieces[-1].finish_reason == "stop"


def test_a_closed_llm_and_one_without_a_tokenizer() -> None:
    llm = make()
    llm.close()
    with pytest.raises(LlmcError) as caught:
        llm.generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E608"
    with pytest.raises(LlmcError) as caught:
        make(tok=None).generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E620"


def test_prompts_after_a_refused_one_release_their_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal by the compiler, a remembered one, one of the prompt, and an interrupt."""
    llm = make()
    llm.generate("x", structured("a+"), use_tqdm=False)
    workers = llm._core.grammars()._workers
    for prompt, form in (("x", "((("), ("x", "((("), ([5] * 10_000, "c+")):
        with pytest.raises(LlmcError, match="prompt 1 of 3"):
            llm.generate(["x", prompt, "x"], [structured("a+"), structured(form), structured("b+")], use_tqdm=False)
        assert workers.guides == 0
    monkeypatch.setattr(llm._core.grammars(), "pump", lambda seconds: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "x"], [structured("d+"), structured("e+")], use_tqdm=False)
    assert not any(grammar.openings for grammar in llm._core.grammars()._grammars.values())


def test_a_forked_process_gets_an_error_at_once() -> None:
    llm = make()
    llm._lock._process += 1
    with pytest.raises(LlmcError) as caught:
        llm.generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E609"


def test_end_tokens_are_where_the_grammar_ends() -> None:
    """Also of a request that ignores them: nothing else may follow."""
    end = TOK.named_id("eos_token")
    for ignore in (False, True):
        for seed in range(8):
            requested = structured("(ab)*", seed=seed, ignore_eos=ignore)
            (one,) = make().generate("x", requested, use_tqdm=False)[0].outputs
            assert re.fullmatch("(ab)*a?", one.text) and (end in one.token_ids) == (one.finish_reason == "stop")
            assert one.finish_reason == "length" or re.fullmatch("(ab)*", one.text)
