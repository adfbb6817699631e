"""Grammars on the simulated device: steps under way, compiling beside other requests, and what closes or takes long."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from llmc_runtime import LlmcError, SamplingParams, StructuredOutputsParams
from llmc_runtime import grammar as module
from llmc_runtime.core.loop import Loop
from llmc_runtime.grammar import Grammars

from tests.runtime.test_llm import TOK, device, make, params

pytest.importorskip("llguidance")
FORM = "[a-z]{2,5}(-[0-9]{1,3}){1,3}"


def structured(form: str = FORM, **more: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(regex=form)
    return SamplingParams(**{"max_tokens": 40, "seed": 3, "structured_outputs": wanted} | more)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_texts_have_their_form_whatever_is_under_way(depth: int) -> None:
    asked = ["The kernel", "A matrix", "x", [5, 6, 7], "more", "and more"]
    kinds = [structured(), params(12), structured(n=3), params(30), structured(temperature=0.0), params(3)]
    outputs = make(device(depth)).generate(asked, kinds, use_tqdm=False)
    for prompt, kind, output in zip(asked, kinds, outputs):
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


def test_the_vocabulary_is_built_beforehand_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOK, TOK.vocab_size, [2])
    assert grammars.prepare() == ""
    monkeypatch.setattr(Grammars, "_build", lambda *args: pytest.fail("it is there"))
    wanted = structured().structured_outputs
    assert wanted is not None and grammars.wait(grammars.submit(wanted)) is not None
    grammars.close()


def test_why_no_vocabulary_can_be_built_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> None:
        raise LlmcError("E651", "a tokenizer of another kind", "another model")

    monkeypatch.setattr(Grammars, "_build", build)
    assert Grammars(TOK, TOK.vocab_size, [2]).prepare() == "a tokenizer of another kind"
    loop = Loop(make().engine, lambda: None)
    assert "lacks" in loop.prepare()


def test_others_run_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    may, began = threading.Event(), threading.Event()
    right = Grammars._compile

    def slow(self: Grammars, wanted: StructuredOutputsParams) -> Any:
        began.set()
        assert may.wait(20)
        return right(self, wanted)

    monkeypatch.setattr(Grammars, "_compile", slow)
    llm = make()
    told: list[str] = []
    thread = threading.Thread(
        target=lambda: told.append(llm.generate("x", structured(), use_tqdm=False)[0].outputs[0].text)
    )
    thread.start()
    assert began.wait(20)
    assert len(llm.generate("The kernel", params(9), use_tqdm=False)[0].outputs[0].token_ids) == 9 and not told
    may.set()
    thread.join(20)
    assert re.fullmatch(FORM, told[0])


def test_a_grammar_is_compiled_once_and_a_failure_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    right = Grammars._compile

    def counted(self: Grammars, wanted: StructuredOutputsParams) -> Any:
        made.append(wanted.text)
        if len(made) == 1:
            raise LlmcError("E651", "not today", "tomorrow")
        return right(self, wanted)

    monkeypatch.setattr(Grammars, "_compile", counted)
    llm = make()
    with pytest.raises(LlmcError, match=r"prompt 0 of 2: not today"):
        llm.generate(["x", "y"], structured(), use_tqdm=False)
    llm.generate(["x", "y", "z"], structured(n=2), use_tqdm=False)
    assert made == [FORM, FORM]
    for i in range(module.KEPT + 3):
        llm.generate("x", structured(f"a{{{i + 1}}}", max_tokens=1), use_tqdm=False)
    assert llm._grammars is not None and len(llm._grammars._found) == module.KEPT


def test_a_compile_that_takes_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    may = threading.Event()
    monkeypatch.setattr(module, "SECONDS", 0.05)
    monkeypatch.setattr(Grammars, "_compile", lambda self, wanted: may.wait(20))
    llm = make()
    with pytest.raises(LlmcError) as caught:
        llm.generate("x", structured(), use_tqdm=False)
    may.set()
    assert caught.value.code == "E651" and "was not compiled within" in caught.value.cause
    assert not llm.engine.has_work()


def test_a_closed_llm_and_one_without_a_tokenizer() -> None:
    llm = make()
    llm.close()
    with pytest.raises(LlmcError) as caught:
        llm.generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E608"
    with pytest.raises(LlmcError) as caught:
        make(tok=None).generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E620"


def test_a_forked_process_is_told_at_once() -> None:
    llm = make()
    llm._turns._process += 1
    with pytest.raises(LlmcError) as caught:
        llm.generate([[1, 2]], structured(), use_tqdm=False)
    assert caught.value.code == "E609"


def test_end_tokens_are_where_the_grammar_ends() -> None:
    """Also of a request that ignores them: nothing else may follow."""
    end = TOK.named_id("eos_token")
    for ignore in (False, True):
        for seed in range(8):
            asked = structured("(ab)*", seed=seed, ignore_eos=ignore)
            (one,) = make().generate("x", asked, use_tqdm=False)[0].outputs
            assert re.fullmatch("(ab)*a?", one.text) and (end in one.token_ids) == (one.finish_reason == "stop")
            assert one.finish_reason == "length" or re.fullmatch("(ab)*", one.text)
