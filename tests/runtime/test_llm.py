"""LLM over the simulated device: outputs, streams, chats, defaults, and what bad requests do to others (nothing)."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import textkit
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.defaults import default_params
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.rig import OneByOne
from tests.runtime.step_reply import reply

PAGE, PAGES, ROWS, LENGTH, TOKENS = 4, 64, 4, 96, 16


class Recorder:
    """The simulated device, with counters of its calls."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner, self.steps, self.most = inner, 0, 0
        self.depth, self.wait, self.settle = inner.depth, inner.wait, inner.settle

    def launch(self, step: Any) -> Any:
        self.steps += 1
        self.most = max(self.most, len(step.work))
        return self.inner.launch(step)


class Script(OneByOne):
    """A device that answers given ids, whatever the prompt."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.at = ids, {}

    def run(self, step: Any) -> Any:
        for init in step.inits:
            self.at[init.row] = 0
        out = []
        for work in step.work:
            out.append(self.ids[self.at[work.row]] if work.emit else None)
            self.at[work.row] += work.emit
        return reply(out)


def tokenizer() -> Tokenizer:
    tok = textkit.byte_level(bos=True)
    return Tokenizer(tok, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": textkit.TEMPLATE})


TOK = tokenizer()


def device(depth: int = 1) -> FakeExecutor:
    return FakeExecutor(ROWS, PAGES, PAGE, TOK.vocab_size, LENGTH, TOKENS, depth, random.Random(depth))


def make(executor: Any = None, *, tok: Tokenizer | None = TOK, seed: int = 0, **options: Any) -> LLM:
    config = SchedulerConfig(
        PAGES, PAGE, LENGTH, ROWS, TOKENS, TOK.vocab_size,
        eos_token_ids=(TOK.named_id("eos_token") or 0,),
    )  # fmt: skip
    fake = device()
    draws = random.Random(seed)
    engine = Engine(Scheduler(config, lambda: draws.getrandbits(64)), executor or Recorder(fake))
    return LLM.over(engine, tok, **options)


def params(n: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, **({"ignore_eos": True, "seed": 7} | more))


def test_many_prompts_run_together_and_come_back_in_order() -> None:
    prompts = ["The kernel of a matrix", [5, 6, 7], {"prompt": "a b"}, {"prompt_token_ids": [9, 8]}, "x", "y"]
    llm = make()
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    assert [o.prompt for o in outputs] == [prompts[0], None, "a b", None, "x", "y"]
    assert outputs[0].prompt_token_ids == TOK.encode("The kernel of a matrix")
    assert outputs[0].prompt_token_ids[0] == TOK.bos_token_id
    assert llm.engine.executor.most == ROWS
    for output in outputs:
        alone = make().generate([{"prompt_token_ids": output.prompt_token_ids}], params(), use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) == 8
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
        assert output.finished
        whole = TOK.decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert whole == TOK.decode(output.prompt_token_ids) + output.outputs[0].text
    assert not llm.engine.has_work()


@pytest.mark.parametrize("prompt", ["The kernel", [5, 6, 7], (5, 6)])
def test_one_prompt_needs_no_list(prompt: Any) -> None:
    assert len(make().generate(prompt, params(), use_tqdm=False)) == 1


def test_no_prompts_give_no_outputs() -> None:
    assert make().generate([], params()) == []


def test_arrays_are_token_ids() -> None:
    np = pytest.importorskip("numpy")
    assert make().generate(np.array([5, 6]), params(), use_tqdm=False)[0].prompt_token_ids == [5, 6]


def test_a_stream_says_what_generate_says() -> None:
    for prompt in ("The kernel", [5, 6, 7]):
        expected = make().generate(prompt, params(12), use_tqdm=False)[0]
        stream = make().stream(prompt, params(12))
        pieces = list(stream)
        assert "".join(p.text for p in pieces) == expected.outputs[0].text
        assert [t for p in pieces for t in p.token_ids] == expected.outputs[0].token_ids
        assert [p.finish_reason for p in pieces] == [None] * 11 + ["length"]
        assert stream.output.outputs == expected.outputs


def test_streams_and_lists_share_the_engine() -> None:
    llm = make()
    first, second = llm.stream("a b", params(10)), llm.stream("c d", params(10))
    next(first), next(second)
    middle = llm.generate("e f", params(10), use_tqdm=False)[0]
    rest = [t for p in first for t in p.token_ids]
    assert len(rest) == 9
    assert middle.outputs[0].token_ids == make().generate("e f", params(10), use_tqdm=False)[0].outputs[0].token_ids
    assert len([t for p in second for t in p.token_ids]) == 9


def test_a_stream_without_a_reader_ends() -> None:
    llm = make()
    stream = llm.stream("a b", params(50))
    next(stream)
    del stream
    gc.collect()
    assert not llm.engine.has_work()
    with llm.stream("a b", params(50)) as stream:
        next(stream)
    assert not llm.engine.has_work()
    assert list(stream) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_ends_the_requests_and_the_llm_goes_on(depth: int) -> None:
    class Impatient(Recorder):
        def launch(self, step: Any) -> Any:
            if self.steps == 3:
                self.steps += 1
                raise KeyboardInterrupt
            return super().launch(step)

    llm = make(Impatient(device(depth)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params(), use_tqdm=False)
    assert not llm.engine.has_work()
    expected = make().generate("a", params(), use_tqdm=False)[0].outputs
    assert llm.generate("a", params(), use_tqdm=False)[0].outputs == expected


def test_a_broken_device_is_an_error_and_not_an_answer() -> None:
    class Broken(OneByOne):
        def run(self, step: Any) -> Any:
            raise LlmcError("E114", "the device failed", "")

    with pytest.raises(LlmcError, match="E114"):
        make(Broken()).generate("a", params(), use_tqdm=False)
    with pytest.raises(LlmcError, match="E114"):
        list(make(Broken()).stream("a", params()))


# --- stopping


def script(text: str, *, eos: bool = False) -> Script:
    ids = TOK.encode(text, add_special_tokens=False)
    return Script(ids + ([TOK.named_id("eos_token")] if eos else []) + TOK.encode("the" * 40))  # type: ignore[list-item]


def test_a_stop_string_ends_a_request_early() -> None:
    llm = make(script(" the sea and the sky"))
    output = llm.generate("a", params(40, stop=["sky", " and"]), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (" the sea", "stop", " and")
    assert TOK.decode(output.token_ids) == " the sea and"
    assert not llm.engine.has_work()
    pieces = list(make(script(" the sea and the sky")).stream("a", params(40, stop=["sky", " and"])))
    assert "".join(p.text for p in pieces) == " the sea"
    assert pieces[-1].stop_reason == " and"


def test_the_stop_string_may_stay() -> None:
    wanted = params(40, stop=[" and"], include_stop_str_in_output=True)
    assert make(script(" the sea and the")).generate("a", wanted, use_tqdm=False)[0].outputs[0].text == " the sea and"


def test_eos_ends_without_text_and_without_a_reason_of_its_own() -> None:
    llm = make(script(" the sea", eos=True))
    output = llm.generate("a", params(40, ignore_eos=False, skip_special_tokens=False), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (" the sea", "stop", None)
    assert output.token_ids[-1] == TOK.eos_token_id


def test_a_stop_token_id_is_named_and_its_text_left_out() -> None:
    ids = TOK.encode(" the sea and", add_special_tokens=False)
    wanted = params(40, stop_token_ids=[ids[-1]])
    output = make(script(" the sea and")).generate("a", wanted, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[-1])
    assert output.token_ids == ids
    assert output.text == TOK.decode(ids[:-1])


# --- log-probabilities, cache, seeds


def test_logprobs_name_the_sampled_token_first() -> None:
    output = make().generate("a b", params(4, logprobs=2), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 4
    for token, row in zip(output.token_ids, output.logprobs):
        assert next(iter(row)) == token
        assert len(row) == 2
        assert row[token].rank == 1
        assert row[token].decoded_token == TOK.decode([token], skip_special_tokens=False)
    assert output.cumulative_logprob == pytest.approx(-0.5 * 4)
    assert make().generate("a b", params(4), use_tqdm=False)[0].outputs[0].logprobs is None
    pieces = list(make().stream("a b", params(4, logprobs=0)))
    assert [len(p.logprobs or ()) for p in pieces] == [1] * 4


def test_cached_prompt_tokens_are_counted() -> None:
    llm = make()
    prompt = list(range(20))
    assert llm.generate(prompt, params(), use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, params(), use_tqdm=False)[0].num_cached_tokens == 16


def test_a_seed_decides_the_draws() -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)

    def draw(seed: int) -> list[int]:
        return make(seed=seed).generate("a", sampled, use_tqdm=False)[0].outputs[0].token_ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


# --- chats


def test_chat_is_the_template_without_a_second_bos() -> None:
    messages = [{"role": "user", "content": " hi "}]
    output = make().chat(messages, params(), use_tqdm=False)[0]
    assert output.prompt == "<s><|user|>hi<|end|><|assistant|>"
    assert output.prompt_token_ids == TOK.encode(output.prompt, add_special_tokens=False)
    pieces = list(make().stream_chat(messages, params()))
    assert "".join(p.text for p in pieces) == output.outputs[0].text


def test_several_chats_and_another_template() -> None:
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    outputs = make().chat(chats, params(), use_tqdm=False, chat_template="<|user|>{{ messages[0].content }}")
    assert [o.prompt for o in outputs] == ["<|user|>a", "<|user|>b"]
    with pytest.raises(LlmcError, match="prompt 1 of 2: message 0"):
        make().chat([chats[0], [{"content": "b"}]], params())


def test_a_chat_without_a_template_is_refused() -> None:
    llm = make(tok=Tokenizer(textkit.byte_level(), {}, {}))
    assert not llm.has_chat_template
    with pytest.raises(LlmcError) as e:
        llm.chat([{"role": "user", "content": "a"}])
    assert e.value.code == "E630"


# --- defaults


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 0.0, "max_tokens": 16}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 7,
             "repetition_penalty": 1.1, "eos_token_id": [1, 2], "unknown": {}},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_tokens": 7, "repetition_penalty": 1.1},
        ),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05, "temperature": 0.0}),
    ],
)  # fmt: skip
def test_defaults_come_from_generation_config(generation: dict[str, Any], expected: dict[str, Any]) -> None:
    found = default_params(generation)
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_defaults_are_used_and_bad_ones_are_named() -> None:
    llm = make(generation={"max_new_tokens": 3})
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) == 3
    bad = make(generation={"do_sample": True, "top_p": 7})
    with pytest.raises(LlmcError, match=r"generation_config\.json: top_p = 7"):
        bad.generate("a", use_tqdm=False)
    assert bad.generate("a", params(2), use_tqdm=False)


def test_a_chat_may_fill_the_context() -> None:
    llm = make(Script(TOK.encode("the" * 200, add_special_tokens=False)))
    output = llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == LENGTH


# --- bad requests


BAD: dict[str, tuple[Any, str]] = {
    "empty ids": ([], "E605"),
    "id too large": ([5, 10**6], "E606"),
    "negative id": ([-1], "E606"),
    "too long": (list(range(100)) * 2, "E602"),
    "not an id": ([5, "x"], "E625"),
    "a float": ([5.0], "E625"),
    "a boolean": ([True], "E625"),
    "bytes": (b"ab", "E625"),
    "none": (None, "E625"),
    "a number": (7, "E625"),
    "an empty dict": ({}, "E625"),
    "a surrogate": ("a\ud800", "E621"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_prompt_is_named_before_anything_runs(name: str) -> None:
    prompt, code = BAD[name]
    llm = make()
    with pytest.raises(LlmcError) as e:
        llm.generate(["good", prompt, "good too"], params(), use_tqdm=False)
    assert e.value.code == code
    assert e.value.cause.startswith("prompt 1 of 3: ")
    assert e.value.remedy
    assert llm.engine.executor.steps == 0
    assert not llm.engine.has_work()
    assert len(llm.generate("good", params(), use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_an_empty_text_without_bos_is_an_empty_prompt() -> None:
    llm = make(tok=Tokenizer(textkit.byte_level(), {}, {}))
    with pytest.raises(LlmcError) as e:
        llm.generate("", params())
    assert e.value.code == "E605"


def test_parameters_that_do_not_fit_are_refused() -> None:
    llm = make()
    with pytest.raises(LlmcError, match="E603"):
        llm.generate("a", params(1000), use_tqdm=False)
    with pytest.raises(LlmcError, match="2 prompts, but 3 sampling_params"):
        llm.generate(["a", "b"], [params()] * 3)
    with pytest.raises(LlmcError, match="E625"):
        llm.generate("a", {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(LlmcError, match="2 prompts, but 1 priorities"):
        llm.generate(["a", "b"], params(), priority=[1])
    for bad in (5, "12", [True, False], ["a", "b"], {1: 2}):
        with pytest.raises(LlmcError, match=r"E6\d\d: .*priority"):
            llm.generate(["a", "b"], params(), priority=bad)  # type: ignore[arg-type]


def test_without_a_tokenizer_ids_work_and_text_does_not() -> None:
    llm = make(tok=None)
    output = llm.generate([5, 6], params(logprobs=1), use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (8, "")
    for bad in (lambda: llm.generate("a"), lambda: llm.generate([5], params(stop=["x"])), llm.get_tokenizer):
        with pytest.raises(LlmcError) as e:
            bad()
        assert e.value.code == "E620"


def test_the_progress_bar_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make().generate(["a", "b"], params(), use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    make().generate(["a", "b"], params(), use_tqdm=False)
    assert capsys.readouterr().err == ""
