"""The expected output of the simulated device as a client's text, computed from the prefix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llmc_runtime.sched.request import Request
from llmc_runtime.sched.request_init import init_request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.text.detokenizer import detokenizer

from tests.attacks.fake_engine import SEED, VOCAB
from tests.runtime.oracle import Expected
from tests.runtime.served import TOK

GOLDEN: dict[str, Any] = {
    "prompt": [20, 30, 40, 50, 60, 70, 80, 90, 100], "max_tokens": 12, "temperature": 0, "seed": 7, "ignore_eos": True,
}  # fmt: skip


def tokens(prompt: Sequence[int], most: int, seed: int = 7, temperature: float = 0.0) -> list[int]:
    """The continuation, nothing stopping it."""
    config = SchedulerConfig(1 << 20, 4, 1 << 20, 1, 1, VOCAB)
    params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True, seed=seed)
    request = Request("x", list(prompt), params)
    init_request(request, config, SEED)
    expected = Expected(request, config)
    return [expected.next()[0] for _ in range(most)]


def text(prompt: Sequence[int], ids: Sequence[int]) -> str:
    """As a client gets it: characters that begin in the prompt end in the answer."""
    stream = detokenizer(TOK, prompt)
    return "".join([*map(stream.push, ids), stream.flush()])


@lru_cache(1 << 14)
def _answer(prompt: tuple[int, ...], most: int, seed: int, temperature: float) -> str:
    return text(prompt, tokens(prompt, most, seed, temperature))


def answer(prompt: Sequence[int], most: int, seed: int = 7, temperature: float = 0.0) -> str:
    """The text of the continuation."""
    return _answer(tuple(prompt), most, seed, temperature)
