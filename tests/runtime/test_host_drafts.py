"""Drafts made on the host: a failing or nonsensical Draft of another package harms no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime.drafts import Draft, DraftContext
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched import draft_methods
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.speculate_option import REFUSED, check_speculate

from tests.runtime.simulator import make_device

CONFIG = SchedulerConfig(
    num_pages=64, page_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, vocab_size=40,
    speculation=SpeculationConfig(3, host="test"), max_num_logits=16,
)  # fmt: skip


class Programmed(Draft):
    """Proposes what a function returns, and records its calls."""

    def __init__(self, propose: Callable[[DraftContext, int], Sequence[int]]) -> None:
        self._propose, self.calls, self.ended = propose, 0, list[str]()

    def propose(self, context: DraftContext, most: int) -> Sequence[int]:
        self.calls += 1
        return self._propose(context, most)

    def end(self, context: DraftContext) -> None:
        self.ended.append(context.id)


def outputs(draft: Draft | None, depth: int = 1, count: int = 3) -> dict[str, list[int]]:
    """Run some requests. Return the tokens of each."""
    speculation = CONFIG.speculation if draft is not None else None
    config = SchedulerConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__slots__} | {"speculation": speculation})
    engine = Engine(Scheduler(config, lambda: 7, draft=draft), make_device(config, depth))
    for number in range(count):
        engine.add(Request(str(number), [1 + number, 2, 3], SamplingParams(max_tokens=50)))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            tokens.setdefault(delta.id, []).extend(delta.new_token_ids)
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "propose",
    [
        lambda context, most: [],
        lambda context, most: [5] * most,
        lambda context, most: [5] * 100,
        lambda context, most: [40, 1, -1],
        lambda context, most: [1, -7, 1 << 40],
        lambda context, most: context.tokens[-most:],
    ],
)
def test_tokens_are_those_without_drafts(propose: Any, depth: int) -> None:
    draft = Programmed(propose)
    tokens = outputs(draft, depth)
    assert tokens == outputs(None, depth)
    assert draft.calls and sorted(draft.ended) == ["0", "1", "2"]


@pytest.mark.parametrize("value", ["x", 1.5, None, [1]])
def test_a_draft_that_fails_ends_drafting(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    draft = Programmed(lambda context, most: [value])
    with caplog.at_level(logging.ERROR, "llmc.engine"):
        tokens = outputs(draft)
    assert tokens == outputs(None)
    assert draft.calls == 1 and not draft.ended
    assert [r.getMessage() for r in caplog.records] == ["drafting has ended: Programmed failed"]
    assert "TypeError" in caplog.text


def test_a_draft_without_proposals_is_rarely_called() -> None:
    draft = Programmed(lambda context, most: [])
    outputs(draft, count=1)
    assert 16 <= draft.calls <= 16 + 2, "for 50 tokens: at the first 16, then after 16 and 32 more"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Offer entry points under the name `theirs`."""

    def offer(*values: str) -> None:
        points = tuple(EntryPoint("theirs", value, draft_methods.GROUP) for value in values)
        monkeypatch.setattr(metadata, "entry_points", lambda group, name: points if name == "theirs" else ())

    return offer


def test_a_package_offers_a_method(package: Any) -> None:
    package("llmc_runtime.sched.suffix_draft:SuffixDraft")
    assert check_speculate("speculate", "theirs:3") == {"method": "theirs", "num_speculative_tokens": 3}
    assert isinstance(draft_methods.open_draft("theirs"), Draft)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (("no_such_module:X",), "ModuleNotFoundError"),
        (("builtins:list",), "is not a Draft"),
        (("llmc_runtime.sched.host_draft:Draft",), "TypeError"),
        (("builtins:list", "builtins:dict"), "more than one package offers it"),
        ((), "no installed package offers it"),
    ],
)
def test_a_method_that_cannot_be_opened(package: Any, values: tuple[str, ...], cause: str) -> None:
    package(*values)
    with pytest.raises(LlmcError, match=cause) as caught:
        draft_methods.open_draft("theirs")
    assert caught.value.code == "E206"


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(LlmcError, match="'medusa' is not supported"):
        check_speculate("speculate", "medusa:3")
    with pytest.raises(LlmcError, match="unknown key 'prompt_lookup_max'"):
        check_speculate("speculate", {"method": "suffix", "num_speculative_tokens": 2, "prompt_lookup_max": 3})


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_keys_of_the_draft_model_in_vllms_json(method: str) -> None:
    """The artifact decides on the ranks of the draft model, so that their number has no effect."""
    published = {"method": method, "model": "any", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 3}
    assert check_speculate("speculate", published) == {"method": method, "num_speculative_tokens": 3, "model": "any"}
    with pytest.raises(LlmcError, match="unknown key 'draft_tensor'"):
        check_speculate("speculate", {"method": method, "draft_tensor": 2})


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("ngram", "ngram"),
        ("[ngram]", "ngram"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("meta-llama/Llama-3.2-1B", "draft_model"),
        (None, "ngram"),
    ],
)
def test_a_method_that_vllm_infers_from_the_model(model: str | None, method: str) -> None:
    found = check_speculate("speculate", {"model": model, "num_speculative_tokens": 3})
    assert found is not None and (found["method"], found["num_speculative_tokens"]) == (method, 3)


def test_names_of_prompt_lookup() -> None:
    lookup = check_speculate("speculate", "ngram:3")
    for more in ({"method": "ngram", "model": "[ngram]"}, {"method": "[ngram]"}, {"method": "ngram_gpu"}):
        assert check_speculate("speculate", {"num_speculative_tokens": 3, **more}) == lookup


def test_values_of_the_keys_without_effect_are_checked() -> None:
    """The first version of EAGLE is not EAGLE-3."""
    for more, code, cause in (
        ({"method": "eagle3", "draft_tensor_parallel_size": "two"}, "E201", "draft_tensor_parallel_size = 'two'"),
        ({"method": "draft_model", "draft_tensor_parallel_size": 0}, "E201", "draft_tensor_parallel_size = 0"),
        ({"method": "draft_model", "model": 5}, "E201", "model = 5 is not allowed"),
        ({"method": "ngram", "model": "meta-llama/Llama-3.2-1B"}, "E201", "unknown key 'model'"),
        (
            {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"},
            "E206",
            "the method 'eagle' is not supported: this is the first",
        ),
        ({"method": "eagle"}, "E206", "EAGLE-3 is eagle3"),
        ({"method": "mlp_speculator", "model": "any"}, "E206", "'mlp_speculator' is not supported: heads that draft"),
    ):
        with pytest.raises(LlmcError, match=cause) as caught:
            check_speculate("speculate", {"num_speculative_tokens": 3, **more})
        assert caught.value.code == code and caught.value.remedy


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle3", "mtp"])
def test_keys_of_vllm_that_are_not_supported_are_refused_by_name(method: str, key: str) -> None:
    with pytest.raises(LlmcError, match=f"{key} is not supported: ") as caught:
        check_speculate("speculate", {"method": method, "num_speculative_tokens": 2, key: 4})
    assert caught.value.code == "E206" and f"leave it out; {method} has the keys method" in str(caught.value)
    with pytest.raises(LlmcError, match="unknown key"):
        check_speculate("speculate", {"method": method, f"{key}_": 4})


def test_defaults_of_vllm_are_no_keys() -> None:
    """A config that was written out whole, with null and false for what is not set."""
    unset = dict.fromkeys((*REFUSED, "prompt_lookup_max", "draft_tensor_parallel_size"))
    off = {"disable_padded_drafter_batch": False, "parallel_drafting": False, "enforce_eager": False}
    want = {"method": "eagle3", "num_speculative_tokens": 2}
    assert check_speculate("speculate", {**unset, **off, **want, "model": None}) == want
    with pytest.raises(LlmcError, match="parallel_drafting is not supported"):
        check_speculate("speculate", {**want, "parallel_drafting": True})


@pytest.mark.parametrize(
    ("speculate", "draft", "count"),
    [
        (None, "small.llmc", None),
        ("draft", "small.llmc", None),
        ("draft:3", Path("small.llmc"), 3),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "small.llmc", 3),
        ({"method": "draft_model", "num_speculative_tokens": 3, "model": "small.llmc"}, None, 3),
        ({"num_speculative_tokens": 3, "model": "small.llmc"}, None, 3),
        ({"num_speculative_tokens": 3, "model": "small.llmc"}, "small.llmc", 3),
    ],
)
def test_the_artifact_of_a_draft_model(speculate: Any, draft: Any, count: int | None) -> None:
    """It implies its method; vLLM's JSON may name it. The engine process gets the same options."""
    options = EngineOptions("m", speculate=speculate, draft_model=draft)
    assert options.speculate == {"method": "draft_model", "num_speculative_tokens": count}
    assert str(options.draft_model) == "small.llmc"
    assert "draft" not in options.compile_options and int(options.compile_options["speculate"]) == (count or 4)
    again = EngineOptions.of_message("m", options.message())
    assert again.speculate == options.speculate and again.draft_model == str(Path("small.llmc").resolve())


def test_a_draft_model_that_is_left_out() -> None:
    options = EngineOptions("m", speculate="off", draft_model="small.llmc")
    assert options.speculate is None and options.draft_model is None
    options = EngineOptions("m", speculate={"method": "draft_model", "model": "owner/small"})
    assert options.draft_model is None, "a model, which is compiled into the artifact"


def test_a_draft_model_that_contradicts_the_method() -> None:
    for speculate, draft, code, cause in (
        ("ngram:3", "small.llmc", "E206", "draft_model is given, and speculate requests the method ngram"),
        ({"method": "eagle3"}, "small.llmc", "E206", "requests the method eagle3"),
        ({"model": "a.llmc"}, "b.llmc", "E206", "draft_model is b.llmc, and the model of speculate is a.llmc"),
        ("draft:0", "small.llmc", "E201", "is not allowed"),
        (None, 5, "E201", "draft_model = 5 is not allowed"),
    ):
        with pytest.raises(LlmcError, match=cause) as caught:
            EngineOptions("m", speculate=speculate, draft_model=draft)  # type: ignore[arg-type]
        assert caught.value.code == code and caught.value.remedy


@pytest.mark.parametrize("number", ["", "abc", "-1", "+2", " 2", "2.0", "\u0663", "9" * 5000, "2:3"])
def test_numbers_that_are_not_allowed(number: str) -> None:
    """One error with the values that are allowed; also for more digits than Python converts."""
    with pytest.raises(LlmcError, match="is not allowed") as caught:
        check_speculate("speculate", f"ngram:{number}")
    assert caught.value.code == "E201" and ":K for K drafted tokens" in caught.value.remedy


@pytest.mark.parametrize("low", ["3", [3], {"a": {}}, 2.0, True, 0, 65])
def test_shortest_ngrams_that_are_not_allowed(low: object) -> None:
    """One error, also without prompt_lookup_max, whose default depends on prompt_lookup_min."""
    with pytest.raises(LlmcError, match="prompt_lookup_min = ") as caught:
        check_speculate("speculate", {"method": "ngram", "prompt_lookup_min": low})
    assert caught.value.code == "E201" and caught.value.remedy == "use a whole number, 1 to 64"
