"""llmc-serve with engines of two ranks, over HTTP: drafts, grammars, the prefix cache, metrics, kills, a restart."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.host_info import usable_cpus
from models.test_pooling_server import Served, serve
from models.test_rank_failures import LATEST, ended, ranks_of

from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.served import until

pytest.importorskip("starlette")
pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(usable_cpus() < 2, reason="two engines need two CPUs"),
]  # fmt: skip
DEMO = Path(__file__).parents[2] / "examples" / "demo-model-small"
TEXTS = ("The river", "Once upon a time", "The kernel", "In the beginning")
KEY = "an-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}


def compiled(folder: Path, **options: Any) -> Path:
    path = folder / "model.llmc"
    limits = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    compile_model(DEMO, path, Options(cache=CACHE, dtype="float32", **(limits | options)))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines of two ranks, which verify drafts."""
    folder = tmp_path_factory.mktemp("served")
    admin = folder / "admin.txt"
    admin.write_text(KEY)
    path = compiled(folder, tensor_parallel_size=2, speculate=3)
    options = "--data-parallel-size=2", "--speculate=ngram:3", "--threads=1", f"--admin-key-file={admin}"
    yield from serve(path, folder / "log", *options)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The outputs of the model without ranks and drafts."""
    with LLM(compiled(tmp_path_factory.mktemp("whole")), say=lambda line: None) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        return [out.outputs[0].text for out in llm.generate(TEXTS, params, use_tqdm=False)]


def complete(server: Served, text: str, **fields: Any) -> Any:
    body = {"model": "m", "prompt": text, "temperature": 0, "max_tokens": 40, "ignore_eos": True} | fields
    return server.post("/v1/completions", **body)


def metric(server: Served, name: str) -> dict[str, float]:
    """The values of a metric by engine."""
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(f"llmc:{name}{{")]
    return {line.partition('engine="')[2][0]: float(line.rpartition(" ")[2]) for line in lines}


def engines(server: Served) -> list[dict[str, Any]]:
    return list(server.http.get("/admin/state", headers=ADMIN).json()["engines"])


def test_texts_are_those_of_the_whole_model_without_drafts(server: Served, texts: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            found = pool.map(lambda text: complete(server, text)["choices"][0]["text"], TEXTS * 2)
            assert [*found] == texts * 2
    end = time.monotonic() + 20  # engines report their counts from time to time
    while min(metric(server, "generation_tokens_total").values()) < 80:  # both engines have worked
        assert time.monotonic() < end, metric(server, "generation_tokens_total")
        time.sleep(0.1)
    drafts = metric(server, "spec_decode_num_accepted_tokens_total")
    assert len(drafts) == 2 and sum(drafts.values()) > 0


def test_a_second_turn_finds_its_prefix(server: Served, texts: list[str]) -> None:
    talk = "What is a river? " * 12
    first = complete(server, talk)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    second = complete(server, talk + first["choices"][0]["text"])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 32


def test_guided_output_follows_its_schema(server: Served) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": ["one", "two"]}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    with ThreadPoolExecutor(4) as pool:
        body = {"response_format": form, "temperature": 1, "ignore_eos": False}
        for found in pool.map(lambda seed: complete(server, "A number:", seed=seed, **body), range(4)):
            assert json.loads(found["choices"][0]["text"])["n"] in ("one", "two")


def test_a_rank_that_is_killed_under_load_is_an_error_and_returns(server: Served, texts: list[str]) -> None:
    stop = threading.Event()

    def ask(text: str) -> tuple[int, float]:
        """Ask until a request fails; return its status and the time."""
        while not stop.is_set():
            body = {"model": "m", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "prompt": text}
            status = server.http.post("/v1/completions", json=body).status_code
            if status != 200:
                return status, time.monotonic()
        return 200, math.inf

    for one in engines(server):
        (rank,) = ranks_of(one["pid"])
        stop.clear()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, text) for text in TEXTS * 2]
            until(lambda: min(each["requests"] for each in engines(server)) > 0, 60)
            os.kill(rank, signal.SIGKILL)
            killed = time.monotonic()
            wait(asked, LATEST, FIRST_COMPLETED)
            stop.set()
        found = [each.result() for each in asked]
        assert {status for status, _ in found} <= {200, 503}
        assert min(at for _, at in found) - killed < LATEST
        until(lambda: all(each["state"] == "ready" for each in engines(server)), 60)
        assert complete(server, TEXTS[0])["choices"][0]["text"] == texts[0]
    assert metric(server, "restarts_total") == {"0": 1, "1": 1}


def test_engines_are_restarted_with_their_ranks(server: Served, texts: list[str]) -> None:
    before = [pid for one in engines(server) for pid in (one["pid"], *ranks_of(one["pid"]))]
    assert len(before) == 4
    reply = server.http.post("/admin/restart", json={}, headers=ADMIN)
    assert reply.json() == {"restarted": [0, 1]} and ended(before)
    assert [complete(server, text)["choices"][0]["text"] for text in TEXTS] == texts
