"""The endpoints of models that pool, by HTTP: an embedding model and a cross-encoder, compiled for the CPU."""

from __future__ import annotations

import asyncio
import base64
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, AsyncLLM, LlmcError, PoolingParams
from models.test_pooling import BERT, CROSS, LENGTH, ROWS, VOCAB, save

from llmc.driver import compile_model
from llmc.options import Options

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """A server of one model, and the same model in this process."""

    http: httpx.Client
    llm: LLM
    path: Path

    def post(self, route: str, status: int = 200, **fields: Any) -> Any:
        response = self.http.post(route, json=fields)
        assert response.status_code == status, response.text
        return response.json()

    def refuses(self, route: str, code: str, param: str | None, **fields: Any) -> str:
        error = self.post(route, 400, **fields)["error"]
        assert (error["code"], error["param"]) == (code, param), error
        return str(error["message"])


def serve(path: Path, log: Path, *options: str) -> Iterator[Served]:
    """Run llmc-serve with these options."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    program = "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve(sys.argv[1:]))"
    command = [sys.executable, "-c", program, str(path), "--port", str(port), "--served-model-name", "m", *options]
    with log.open("wb") as stderr, LLM(path, say=lambda line: None) as llm:
        server = subprocess.Popen(command, stderr=stderr)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                until = time.monotonic() + 300
                while time.monotonic() < until and server.poll() is None:
                    try:
                        if http.get("/ready").status_code == 200:
                            break
                    except httpx.TransportError:
                        time.sleep(0.2)
                yield Served(http, llm, path)
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("embedder")
    save(BERT, folder)
    compile_model(folder, folder / "out.llmc", Options(cache=CACHE, reuse=False, max_num_seqs=ROWS))
    yield from serve(folder / "out.llmc", folder / "log")


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ranker")
    save(CROSS, folder)
    compile_model(folder, folder / "out.llmc", Options(cache=CACHE, reuse=False, max_num_seqs=ROWS))
    yield from serve(folder / "out.llmc", folder / "log")


def vectors(llm: LLM, texts: list[Any], params: PoolingParams | None = None) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(texts, params, use_tqdm=False)])


def test_embeddings(embedder: Served) -> None:
    """Every form of the input and of the response, compared with the same model in this process."""
    texts = ["w5 w6", "w7", "w8 w9 w10 w11"]
    want = vectors(embedder.llm, texts)
    answer = embedder.post("/v1/embeddings", model="m", input=texts, user="me")
    assert answer["object"] == "list" and answer["model"] == "m"
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert np.allclose([item["embedding"] for item in answer["data"]], want, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 4 + 3 + 6
    packed = embedder.post("/v1/embeddings", input=texts, encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed]
    assert np.allclose(decoded, want, atol=1e-6)
    for same in ("w7", [2, 7, 3], [[2, 7, 3]]):
        (item,) = embedder.post("/v1/embeddings", input=same)["data"]
        assert np.allclose(item["embedding"], want[1], atol=1e-6)
    short = PoolingParams(dimensions=5, use_activation=True)
    (item,) = embedder.post("/v1/embeddings", input="w7", dimensions=5, use_activation=True)["data"]
    assert np.allclose(item["embedding"], vectors(embedder.llm, ["w7"], short)[0], atol=1e-6)
    assert abs(np.linalg.norm(item["embedding"]) - 1) < 1e-6


def test_normalize_is_another_name(embedder: Served) -> None:
    raw = vectors(embedder.llm, ["w7"], PoolingParams(use_activation=False))[0]
    for fields, want in (
        ({"normalize": False}, raw), ({"normalize": True}, raw / np.linalg.norm(raw)),
        ({"normalize": True, "use_activation": False}, raw),
    ):  # fmt: skip
        (item,) = embedder.post("/v1/embeddings", input="w7", **fields)["data"]
        assert np.allclose(item["embedding"], want, atol=1e-6), fields


def test_openai_client(embedder: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{embedder.http.base_url}/v1", api_key="x")
    answer = client.embeddings.create(model="m", input=["w5 w6", "w7"], dimensions=8)
    want = vectors(embedder.llm, ["w5 w6", "w7"], PoolingParams(dimensions=8))
    assert np.allclose([item.embedding for item in answer.data], want, atol=1e-6) and answer.usage.prompt_tokens == 7


def test_many_inputs_and_large_bodies(embedder: Served) -> None:
    """More inputs than run at a time, in a body that a text process parses."""
    texts = [f"w{5 + i % 80} " + "w9 " * 30 for i in range(400)]
    answer = embedder.post("/v1/embeddings", input=texts)
    assert np.allclose([item["embedding"] for item in answer["data"]], vectors(embedder.llm, texts), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == 400 * 33
    assert embedder.http.get("/load").json() == {"server_load": 0}
    results = embedder.post("/rerank", query="w5", documents=texts, top_n=3)["results"]
    assert len(results) == 3 and all(texts[one["index"]] == one["document"]["text"] for one in results)
    metrics = embedder.http.get("/metrics").text
    assert "generation_tokens_total" in metrics and "request_success_total" in metrics


def test_truncation(embedder: Served, ranker: Served) -> None:
    """Inputs that are too long are refused, or lose their last tokens; special tokens are kept."""
    long = "w6 " * (LENGTH + 5)
    assert "context length" in embedder.refuses("/v1/embeddings", "context_length_exceeded", "input", input=long)
    cut = embedder.post("/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == LENGTH
    (item,) = embedder.post("/v1/embeddings", input="w6 w7 w8 w9", truncate_prompt_tokens=4)["data"]
    assert np.allclose(item["embedding"], vectors(embedder.llm, ["w6 w7"])[0], atol=1e-6)
    ranker.refuses("/v1/score", "context_length_exceeded", "text_2", text_1="w5", text_2=long)
    answer = ranker.post("/v1/score", text_1="w5 w6", text_2="w7 w8 w9", truncate_prompt_tokens=6)
    (want,) = ranker.llm.score("w5 w6", "w7", use_tqdm=False)
    assert abs(answer["data"][0]["score"] - want.outputs.score) < 1e-6


def test_scores(embedder: Served, ranker: Served) -> None:
    texts = ["w7", "w8 w9 w10", "w5 w6"]
    for served in (embedder, ranker):
        want = [o.outputs.score for o in served.llm.score("w5 w6", texts, use_tqdm=False)]
        for route in ("/v1/score", "/score"):
            answer = served.post(route, text_1="w5 w6", text_2=texts)
            assert np.allclose([item["score"] for item in answer["data"]], want, atol=1e-6)
        pairs = served.post("/v1/score", text_1=["w5 w6"] * 3, text_2=texts)
        assert np.allclose([item["score"] for item in pairs["data"]], want, atol=1e-6)
        for route in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = served.post(route, query="w5 w6", documents=[texts[0], {"text": texts[1]}, texts[2]])
            order = [item["index"] for item in answer["results"]]
            assert order == sorted(range(3), key=lambda i: -want[i])
            assert [item["document"]["text"] for item in answer["results"]] == [texts[i] for i in order]
        best = served.post("/v1/rerank", query="w5 w6", documents=texts, top_n=1, return_documents=False)["results"]
        assert len(best) == 1 and best[0].keys() == {"index", "relevance_score"}


def test_classes(ranker: Served) -> None:
    (item,) = ranker.post("/classify", input="w5 w6")["data"]
    (want,) = ranker.llm.classify("w5 w6", use_tqdm=False)
    assert item["label"] == "LABEL_0" and item["num_classes"] == 1
    assert np.allclose(item["probs"], want.outputs.probs, atol=1e-6)


def test_refused(embedder: Served, ranker: Served) -> None:
    for served, route, fields in (
        (embedder, "/v1/completions", {"prompt": "w5"}),
        (embedder, "/classify", {"input": "w5"}),
        (ranker, "/v1/embeddings", {"input": "w5"}),
        (ranker, "/v1/responses", {"input": "w5"}),
    ):
        served.refuses(route, "unsupported_task", "model", **fields)
    refuses = embedder.refuses
    refuses("/v1/embeddings", "invalid_value", "dimensions", input="w5", dimensions=33)
    refuses("/v1/embeddings", "invalid_value", "encoding_format", input="w5", encoding_format="int8")
    refuses("/v1/embeddings", "invalid_value", "input", input=[])
    refuses("/v1/embeddings", "invalid_value", "input", input=[5, 2 * VOCAB])
    refuses("/v1/embeddings", "invalid_value", "input", input=["w5"] * 2049)
    refuses("/v1/embeddings", "unsupported_parameter", "messages", messages=[{"role": "user"}], input="w5")
    refuses("/v1/embeddings", "invalid_type", "input")
    refuses("/v1/rerank", "invalid_value", "top_n", query="w5", documents=["w6"], top_n=0)
    refuses("/v1/rerank", "invalid_value", "documents[0]", query="w5", documents=[5])
    assert "1 to 2048" in refuses("/v1/rerank", "invalid_value", "documents", query="w5", documents=[])
    refuses("/v1/score", "invalid_value", "text_2", text_1=["w5", "w6"], text_2=["w7"] * 3)
    assert "one or more" in refuses("/v1/score", "invalid_value", "text_2", text_1="w5", text_2=[])
    refuses("/v1/embeddings", "unsupported_parameter", "embed_dtype", input="w5", embed_dtype="float16")
    embedder.post("/v1/embeddings", input="w5", embed_dtype="float32", endianness="native")  # vLLM's defaults
    assert embedder.http.get("/ready").status_code == 200
    assert embedder.http.get("/server_info").json()["task"] == "embed"


def test_a_deadline_ends_all_inputs(embedder: Served) -> None:
    late = embedder.http.post(
        "/v1/embeddings", json={"input": ["w5 " * 50] * 300}, headers={"X-Request-Timeout": "0.02"}
    )
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded", late.text
    until = time.monotonic() + 60
    while embedder.http.get("/load").json() != {"server_load": 0}:
        assert time.monotonic() < until
    assert embedder.http.get("/v1/models").json()["data"][0]["vocab_size"] == VOCAB


def test_async_llm(embedder: Served) -> None:
    async def encoded() -> list[float]:
        async with AsyncLLM(embedder.path, say=lambda line: None) as llm:
            with pytest.raises(LlmcError, match="E616"):
                async for _ in llm.generate("w5", None, "a"):
                    pass
            async for output in llm.encode("w5 w6", PoolingParams(dimensions=4), "b"):
                return list(output.outputs.embedding)  # type: ignore[union-attr]
        return []

    want = vectors(embedder.llm, ["w5 w6"], PoolingParams(dimensions=4))[0]
    assert np.allclose(asyncio.run(encoded()), want, atol=1e-6)
