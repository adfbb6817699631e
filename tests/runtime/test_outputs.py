"""Outputs that grow long: what was told of a token is not gone through again with every later one."""

from __future__ import annotations

import random

import pytest
import textkit
from llmc_runtime import SamplingParams
from llmc_runtime.outputs import Collector
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.step import TokenLogprobs
from llmc_runtime.text.tokenizer import Tokenizer


def test_the_whole_is_known_without_reading_it_again() -> None:
    rng = random.Random()
    tok = Tokenizer(textkit.byte_level(), {}, {})
    ids = [rng.randrange(10, tok.vocab_size) for _ in range(60)]
    values = [-rng.random() for _ in ids]
    part = Collector("1", 0, [5], SamplingParams(max_tokens=60, logprobs=0), tok)
    said = []
    for i, (token, value) in enumerate(zip(ids, values)):
        end = "length" if i == len(ids) - 1 else None
        part.take(RequestDelta("1", [token], end, logprobs=[TokenLogprobs(value, 1, [], [])]))
        if rng.random() < 0.5 or end:
            said.append(part.news())
            part.logprobs[:] = [{} for _ in part.logprobs]  # nobody looks into these again
        whole = part.output()
        assert whole.cumulative_logprob == pytest.approx(sum(values[: i + 1]))
        assert len(part._text._told) + len(part._text._fresh) < 5 + i - sum(len(one.token_ids) for one in said)
    assert whole.text == "".join(one.text for one in said) == tok.decode(ids)
