"""Programs for vLLM: its keywords and methods work, are ignored with a line, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import (
    LLM,
    AsyncLLM,
    EngineArgs,
    LlmcError,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.ignored_options import IGNORED, REFUSED, check_ignored
from llmc_runtime.vllm_keywords import OF_SAMPLING

from tests.runtime.rig import Rig
from tests.runtime.test_llm import make

TEMPLATE = "{{ messages[0].content }}{% if loud %}!{% endif %}"
NAMES = {flag.removeprefix("--").replace("-", "_") for row in (*IGNORED, *REFUSED) for flag in row.flags}


def read(**values: Any) -> tuple[EngineOptions, list[str]]:
    said: list[str] = []
    return EngineOptions.of_keywords("m", values, said.append), said


def test_keywords_without_a_meaning_are_ignored_with_a_line() -> None:
    args, said = read(
        gpu_memory_utilization=0.9, pipeline_parallel_size=1, trust_remote_code=False, enforce_eager=True,
        disable_log_stats=True, quantization=None, tokenizer=None, max_num_seqs=3,
    )  # fmt: skip
    assert args.max_num_seqs == 3
    assert [line.split()[0] for line in said] == [
        "gpu_memory_utilization=0.9", "pipeline_parallel_size=1", "enforce_eager=True", "disable_log_stats=True",
    ]  # fmt: skip
    assert all("is ignored: " in line for line in said)


def test_empty_values_change_nothing() -> None:
    """JSON is compared by its value, however it is spelled."""
    _, lines = read(hf_overrides={}, lora_modules=[], pooler_config=None, structured_outputs_config={"backend": "auto"})
    assert [line.split("=")[0] for line in lines] == ["structured_outputs_config"]
    flags = [("--hf-overrides", ["{ }"]), ("--structured-outputs-config", ['{"backend":"xgrammar"}'])]
    assert len(check_ignored([*flags, ("--rope-scaling", ["{}"])])) == 3
    with pytest.raises(LlmcError, match="would change responses"):
        check_ignored([("--hf-overrides", ['{"rope_theta": 1}'])])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pipeline_parallel_size", 2, "pipeline parallelism is not supported"),
        ("trust_remote_code", True, "never run"),
        ("quantization", "awq", "compile another artifact"),
        ("tokenizer", "other/name", "its own"),
        ("skip_tokenizer_init", True, "token ids"),
        ("logits_processors", ["x"], "no external code"),
        ("max_logprobs", 100, "20"),
        ("gpu_memory_utilisation", 0.9, "did you mean 'gpu_memory_utilization'?"),
        ("max_modle_len", 9, "did you mean 'max_model_len'?"),
        ("entirely_unknown_xyz", 1, "the options are"),
    ],
)
def test_keywords_that_would_change_responses_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(LlmcError, match="E648") as e:
        read(**{name: value})
    assert name in e.value.cause and words in e.value.remedy


def test_every_flag_of_the_table_is_a_keyword_too() -> None:
    for name in NAMES:
        assert read(**{name: None})[1] == []
    with pytest.raises(LlmcError, match="E648") as e:
        read(api_key="secret-77")
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_both_classes_take_them(kind: Any) -> None:
    said: list[str] = []
    with pytest.raises(LlmcError, match="E648"):
        kind("m", say=said.append, pipeline_parallel_size=2)
    with pytest.raises(LlmcError, match="no option 'temperature'"):
        kind("m", temperature=1.0)


def test_async_llm_from_engine_args() -> None:
    args = EngineArgs("m", max_num_seqs=3, max_restarts=7)
    assert AsyncLLM.from_engine_args(args).args is args


@pytest.mark.parametrize(
    "options",
    [{"target": "cuda:sm_90"}, {"dtype": "bfloat16"}, {"target": "cpu:x86-64-v3", "dtype": "float32"},
     {"task": "embed"}, {"task": "classify", "dtype": "float32"}],
)  # fmt: skip
def test_options_that_contradict_an_artifact_are_refused(options: dict[str, str], toy: Path) -> None:
    """The toy's is for another CPU target, computes in float32, and generates."""
    with pytest.raises(LlmcError, match="E204") as e:
        LLM(toy, say=lambda line: None, **options)
    assert str(toy) in e.value.cause and "leave" in e.value.remedy
    from llmc_runtime.artifact import open_artifact

    manifest = open_artifact(toy).manifest
    EngineOptions(toy, target=manifest.target.name, dtype="float32", task="generate").check_artifact(manifest)
    EngineOptions(toy).check_artifact(manifest)


@pytest.mark.parametrize("name", ["dtype", "task", "scheduling_policy", "distributed_executor_backend"])
def test_a_value_that_is_none_of_the_choices_is_refused(name: str) -> None:
    with pytest.raises(LlmcError, match=f"{name} = 'none' is not allowed") as caught:
        EngineOptions("m", **{name: "none"})
    assert caught.value.code == "E201" and " or " in caught.value.remedy


def test_a_task_goes_to_the_compiler() -> None:
    assert EngineOptions("m", task="embed").compile_options["task"] == "embed"
    assert "task" not in EngineOptions("m").compile_options


def test_methods_that_are_not_here_say_what_to_do_instead() -> None:
    llm = LLM.over(Rig().engine)
    with pytest.raises(AttributeError, match=r"^LLM has no sleep: close it; opening it again takes seconds$"):
        llm.sleep(1)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^LLM has no nothing_like_it$"):
        llm.nothing_like_it()  # type: ignore[attr-defined]
    assert not hasattr(llm, "wake_up")


def test_methods_and_types_of_programs_for_vllm() -> None:
    llm = LLM.over(Rig().engine)
    params = SamplingParams(temperature=0, max_tokens=2)
    same = params.clone()
    assert same == params and same is not params
    prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
    (output,) = llm.generate(prompt, same, use_tqdm=False, lora_request=None)
    assert len(output.outputs[0].token_ids) == 2
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    with pytest.raises(LlmcError, match=r"E648.*adapters"):
        llm.generate(prompt, params, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(LlmcError, match=r"E648.*adapters"):
        llm.chat([], params, lora_request=object())  # type: ignore[arg-type]
    for name in ("encode", "reward", "beam_search"):
        with pytest.raises(LlmcError, match=r"E648.*not supported"):
            getattr(llm, name)(["a"], "b", use_tqdm=False)
    for refused in (lambda: llm.embed([[1]]), lambda: llm.classify([[1]]), lambda: llm.score("a", "b")):
        with pytest.raises(LlmcError, match=r"E616.*generates text"):
            refused()
    metrics = {m.name: m.value for m in llm.get_metrics()}
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert llm.reset_prefix_cache() is True


def test_other_spellings_of_a_flag_are_keywords_too() -> None:
    args, said = read(speculative_config={"method": "ngram", "num_speculative_tokens": 4}, kv_cache_memory=1 << 20)
    assert said == []
    assert args.speculate == EngineOptions("m", speculate={"method": "ngram", "num_speculative_tokens": 4}).speculate
    assert args.kv_cache_memory_bytes == 1 << 20


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("best_of", 3, "use n"), ("use_beam_search", True, "use n"), ("length_penalty", 0.5, "use n"),
        ("logits_processors", [print], "logit_bias"), ("guided_decoding", {"choice": ["a"]}, "StructuredOutputsParams"),
        ("truncate_prompt_tokens", 8, "shorten"), ("extra_args", {"a": 1}, "no extensions"),
        ("thinking_token_budget", 0, "max_tokens"), ("output_kind", 1, "AsyncLLM.generate"),
    ],
)  # fmt: skip
def test_sampling_parameters_that_would_change_outputs_are_refused(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(LlmcError, match=f"E648.*SamplingParams: {name}=") as e:
        SamplingParams(**{name: value})
    assert remedy in e.value.remedy


def test_sampling_parameters_without_an_effect_are_ignored() -> None:
    harmless: dict[str, Any] = {
        **dict.fromkeys(OF_SAMPLING), "best_of": 1, "length_penalty": 1.0, "early_stopping": False,
        "spaces_between_special_tokens": True, "logits_processors": [], "output_kind": 0,
    }  # fmt: skip
    assert SamplingParams(max_tokens=3, seed=1, **harmless) == SamplingParams(max_tokens=3, seed=1)
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)  # type: ignore[call-arg]
    assert StructuredOutputsParams(regex="a", disable_fallback=True) == StructuredOutputsParams(regex="a")  # type: ignore[call-arg]


def test_misspelt_parameters_get_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams has no parameter 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SamplingParams has no parameter 'zzzzqqqq'$"):
        SamplingParams(zzzzqqqq=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^StructuredOutputsParams has no parameter 'regx'; did you mean 'regex'"):
        StructuredOutputsParams(regx="a")  # type: ignore[call-arg]


def test_engine_args_take_the_same_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    made = EngineArgs("m", gpu_memory_utilization=0.9, max_num_seqs=3, kv_cache_memory=1 << 20)  # type: ignore[call-arg]
    assert made == EngineArgs("m", max_num_seqs=3, kv_cache_memory_bytes=1 << 20)
    assert capsys.readouterr().err.startswith("llmc: gpu_memory_utilization=0.9 is ignored: ")
    with pytest.raises(LlmcError, match=r"E648.*pipeline_parallel_size=2"):
        EngineArgs(model="m", pipeline_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(LlmcError, match=r"E648[^']*'max_num_seq'"):
        EngineArgs("m", max_num_seq=3)  # type: ignore[call-arg]


def test_names_of_vllm() -> None:
    import llmc_runtime

    assert llmc_runtime.AsyncEngineArgs is EngineArgs and llmc_runtime.AsyncLLMEngine is AsyncLLM
    with pytest.raises(ImportError, match=r"^llmc_runtime has no GuidedDecodingParams: use StructuredOutputsParams$"):
        from llmc_runtime import GuidedDecodingParams  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="adapters are not supported"):
        from llmc_runtime import LoRARequest  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(llmc_runtime, "nothing_like_it")


def test_prompts_are_text_or_ids() -> None:
    llm = LLM.over(Rig().engine)
    same: Any = {"prompt_token_ids": [1, 2], "multi_modal_data": None, "mm_processor_kwargs": {}, "cache_salt": "a"}
    assert llm.generate(same, SamplingParams(max_tokens=1), tokenization_kwargs=None)[0].prompt_token_ids == [1, 2]
    for name in ("multi_modal_data", "prompt_embeds", "encoder_prompt", "promt"):
        with pytest.raises(LlmcError, match=f"E625.*a prompt has '{name}'"):
            llm.generate({"prompt_token_ids": [1], name: {"image": 1}}, SamplingParams(max_tokens=1))
    with pytest.raises(LlmcError, match=r"E648.*tokenization_kwargs"):
        llm.generate([[1]], SamplingParams(), tokenization_kwargs={"truncation": True})  # type: ignore[arg-type]


def test_a_chat_takes_vllms_keywords() -> None:
    llm, talk = make(), [{"role": "user", "content": "hi"}]

    def prompt(**more: Any) -> str:
        return str(
            llm.chat(talk, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=TEMPLATE, **more)[0].prompt
        )

    assert prompt() == "hi" and prompt(chat_template_kwargs={"loud": True}) == prompt(loud=True) == "hi!"
    assert prompt(chat_template_content_format="auto", mm_processor_kwargs=None, tokenization_kwargs={}) == "hi"
    for name, value in (("chat_template_content_format", "openai"), ("mm_processor_kwargs", {"a": 1})):
        with pytest.raises(LlmcError, match=f"E648.*{name}"):
            prompt(**{name: value})
    for name in ("tools", "documents"):
        with pytest.raises(LlmcError, match=f"E630.*{name}: the chat template does not show {name}"):
            prompt(**{name: [{"type": "function", "function": {"name": "f"}}]})
        assert prompt(**{name: []}) == "hi"


@pytest.mark.parametrize("name", ["verify", "prepare", "canary", "deterministic", "enable_prefix_caching"])
def test_switches_take_truth_values_only(name: str) -> None:
    for value in ("no", "false", 2, [], 0.0):
        with pytest.raises(LlmcError) as caught:
            EngineOptions("model.llmc", **{name: value})
        assert caught.value.code == "E201" and caught.value.remedy == f"set {name} to True or False"
    assert [getattr(EngineOptions("model.llmc", **{name: value}), name) for value in (True, 0)] == [True, False]
