"""lm-eval local-completions: choices and perplexity by echoed log-probabilities of token ids, and generation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from kit import TEXTS, Server
from lm_eval.tasks import TaskManager

Truth = Callable[..., dict[str, Any]]
ENDINGS = ("she was very happy", "of the the of and", "the sea was calm")


@pytest.fixture
def results(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """The samples of a task over TEXTS, by the text."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": t, "endings": ENDINGS, "label": 0}) + "\n" for t in TEXTS))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("OPENAI_API_KEY", server.key)

    def run(task: dict[str, Any]) -> Any:
        given = {"task": "one", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "demo", "base_url": f"{server.v1}/completions", "tokenizer_backend": "remote",
                "auth_token": server.key, "num_concurrent": 2, "max_retries": 1, "max_length": 1024,
            },
            tasks=[{**given, "test_split": "test", **task}], task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )  # fmt: skip
        return found["results"]["one"], {s["doc"]["text"]: s["resps"] for s in found["samples"]["one"]}

    return run


def scored(truth: Truth, ids: list[int], begin: int) -> float:
    """The log-probability of ids[begin:] after ids[:begin]."""
    rows = truth(prompt={"prompt_token_ids": ids}, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    return sum(rows[i][str(ids[i])] for i in range(begin, len(ids)))


def ids_of(server: Server, text: str) -> list[int]:
    """Token ids without a begin token, as lm-eval asks for them."""
    tokens: list[int] = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    return tokens


def test_choices(server: Server, truth: Truth, results: Callable[..., Any]) -> None:
    task = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{endings}}"}
    figures, samples = results({**task, "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}]})
    right = 0
    for text in TEXTS:
        begin = len(ids_of(server, text))
        true = [scored(truth, ids_of(server, f"{text} {ending}"), begin) for ending in ENDINGS]
        assert [one[0][0] for one in samples[text]] == pytest.approx(true, abs=1e-3)
        right += max(true) == true[0]
    assert figures["acc,none"] == right / len(TEXTS)


def test_perplexity(server: Server, truth: Truth, results: Callable[..., Any]) -> None:
    metrics = [{"metric": "word_perplexity"}]
    figures, _ = results(
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": metrics}
    )
    names = server.get_json("/tokenizer_info")
    bos, eos = (ids_of(server, names[name]) for name in ("bos_token", "eos_token"))
    begins = bos if bos[0] else eos  # lm-eval takes id 0 for none
    true = [scored(truth, begins + ids_of(server, text), 1) for text in TEXTS]
    words = sum(len(text.split()) for text in TEXTS)
    assert figures["word_perplexity,none"] == pytest.approx(math.exp(-sum(true) / words), rel=1e-3)


def test_generation(server: Server, truth: Truth, results: Callable[..., Any]) -> None:
    stops = {"until": ["\n\n", "."], "max_gen_toks": 24}
    _, samples = results(
        {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x",
            "generation_kwargs": stops, "metric_list": [{"metric": "exact_match"}],
        }
    )  # fmt: skip
    for text in TEXTS:
        true = truth(prompt={"prompt_token_ids": ids_of(server, text)}, max_tokens=24, stop=["\n\n", "."])["text"]
        assert samples[text] == [[true]]
