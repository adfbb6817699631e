"""Default sampling parameters: those of the model, neutral ones, those of a file, overrides, and invalid ones."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmc_runtime.cli import run_command
from llmc_runtime.defaults import default_params, described, generation_of
from llmc_runtime.format.errors import LlmcError

MODEL = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 40}


def folder(tmp_path: Path, text: str) -> str:
    (tmp_path / "generation_config.json").write_text(text)
    return str(tmp_path)


def test_precedence_of_defaults(tmp_path: Path) -> None:
    heat = round(random.uniform(0.1, 2), 3)
    other = folder(
        tmp_path, json.dumps({"do_sample": True, "temperature": heat, "transformers_version": "5", "top_k": None})
    )
    assert generation_of(MODEL) == generation_of(MODEL, None) == MODEL
    assert generation_of(MODEL, "vllm") == {}
    assert generation_of(MODEL, other) == {"do_sample": True, "temperature": heat}
    assert generation_of(MODEL, "auto", {"temperature": heat}) == {**MODEL, "temperature": heat}
    assert generation_of({}, "auto", {"top_k": 5}) == {"do_sample": True, "top_k": 5}
    assert generation_of({}, "auto", {"top_k": 5, "do_sample": False}) == {"do_sample": False, "top_k": 5}
    assert generation_of({}, "auto", {"repetition_penalty": 1.1}) == {"repetition_penalty": 1.1}
    assert default_params(generation_of(MODEL, "vllm")).greedy
    assert MODEL["temperature"] == 0.7


@pytest.mark.parametrize(
    ("config", "override", "words"),
    [
        ("nowhere", None, "nowhere"),
        ("auto", {"temprature": 1}, "'temprature'"),
        ("auto", {"top_p": 7}, "top_p = 7"),
        ("vllm", {"temperature": "hot"}, "temperature = 'hot'"),
    ],
)
def test_invalid_defaults_are_reported(config: str, override: Any, words: str) -> None:
    with pytest.raises(LlmcError) as error:
        generation_of(MODEL, config, override)
    assert error.value.code == "E612" and words in error.value.cause and error.value.remedy


@pytest.mark.parametrize("text", ["[", "[1]", "", "{" * 100_000])
def test_a_file_that_is_none_is_reported(text: str, tmp_path: Path) -> None:
    with pytest.raises(LlmcError) as error:
        generation_of({}, folder(tmp_path, text))
    assert error.value.code == "E612"


def test_the_line_for_who_starts_it() -> None:
    line = described(MODEL, "auto", None) or ""
    assert "temperature 0.7, top_p 0.9, max_new_tokens 40" in line and "--generation-config vllm" in line
    assert described({}, "auto", None) is described({"do_sample": False, "top_p": 0.5}, "auto", None) is None
    line = described({"repetition_penalty": 1.1, "top_p": 0.5}, "auto", None) or ""
    assert "repetition_penalty 1.1" in line and "top_p" not in line
    line = described({"do_sample": True, "top_k": 4}, "vllm", {"top_k": 4}) or ""
    assert "top_k 4 (from --override-generation-config)" in line


def test_the_server_samples_with_the_given_defaults() -> None:
    from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest
    from llmc_runtime.server.requests.sampling_fields import of_chat, of_completion

    def params(generation: dict[str, Any], **asked: Any) -> Any:
        llm: Any = SimpleNamespace(generation=generation)
        llm.get_default_sampling_params = lambda max_tokens: default_params(generation, max_tokens=max_tokens)
        chat = of_chat(ChatRequest(messages=[], **asked), llm)
        found = of_completion(CompletionRequest(prompt="x", **asked), llm)
        assert found.temperature == chat.temperature and found.top_p == chat.top_p
        return found

    assert params({}).temperature == params({"do_sample": False, "temperature": 0.6}).temperature == 1
    assert params(MODEL).temperature == 0.7 and params(MODEL, temperature=0.2).temperature == 0.2
    assert params(MODEL, temperature=0.2).top_p == 0.9
    assert params(dict(generation_of(MODEL, "auto", {"temperature": 0}))).greedy
    assert params(dict(generation_of({}, "vllm", {"temperature": 0}))).greedy


def test_both_engines_take_it_and_commands_say_it(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmc_runtime import LLM, AsyncLLM

    override = {"temperature": 0.3, "repetition_penalty": 1.5}
    with LLM(toy, generation_config="vllm", override_generation_config=override, say=lambda line: None) as llm:
        found = llm.get_default_sampling_params()
    assert (found.temperature, found.repetition_penalty) == (0.3, 1.5)

    async def other() -> Any:
        options = {"generation_config": "vllm", "override_generation_config": override, "say": lambda line: None}
        async with AsyncLLM(toy, **options) as llm:
            return llm.get_default_sampling_params()

    assert asyncio.run(other()) == found
    capsys.readouterr()
    words = [str(toy), "--prompt", "ab", "--max-tokens", "1"]
    assert run_command([*words, "--override-generation-config", '{"top_k": 3}'], compiles=False) == 0
    assert "top_k 3" in capsys.readouterr().err
    assert run_command([*words, "--override-generation-config", '{"top_k": 3}', "-q"], compiles=False) == 0
    assert capsys.readouterr().err == ""
    assert run_command([*words, "--generation-config", "nowhere"], compiles=False) == 1
    assert "E612" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_command([*words, "--override-generation-config", "[]"], compiles=False)
