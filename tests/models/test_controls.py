"""Biases, masks and bad words on a compiled model: forbidden tokens never occur; others are sampled as without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.sched.request import Request
from models.cases import LISTED
from models.kit import save

from llmc.driver import compile_model
from llmc.options import Options

ROWS = 6


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A qwen3-like model in float32 of 320 ids, 6 rows, 24 tokens a step."""
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("controls")
    save(LISTED[3], folder / "model", SEED)
    options = Options(cache=CACHE, reuse=False, max_num_seqs=ROWS, max_num_batched_tokens=24)
    compile_model(folder / "model", folder / "model.llmc", options)
    with LLM(folder / "model.llmc", say=lambda line: None) as opened:
        opened.source = folder / "model"  # type: ignore[attr-defined]
        yield opened


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | more)  # type: ignore[arg-type]


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(SEED)
    return [{"prompt_token_ids": rng.integers(3, 320, int(rng.integers(2, 40))).tolist()} for _ in range(count)]


def test_masks_and_biases_choose_among_the_likeliest(llm: LLM) -> None:
    """Beside requests without any, in the same steps."""
    inputs = prompts(ROWS)
    free = [o.outputs[0] for o in llm.generate(inputs, greedy(logprobs=20), use_tqdm=False)]
    tops = [sorted(one.logprobs[0].items(), key=lambda item: item[1].rank) for one in free if one.logprobs]
    ids = [[token for token, _ in top] for top in tops]
    gap = tops[3][0][1].logprob - tops[3][5][1].logprob
    params = [
        greedy(allowed_token_ids=ids[0][7:12]),
        greedy(logit_bias={ids[1][0]: -100, ids[1][1]: -100}),
        greedy(logit_bias={0: 1e9}),
        greedy(logit_bias={ids[3][5]: gap + 0.01, ids[3][6]: 0.0}),
        greedy(temperature=1.0, top_p=0.9, top_k=50, seed=4, allowed_token_ids=[17]),
        greedy(),
    ]
    token_ids = [o.outputs[0].token_ids for o in llm.generate(inputs, params, use_tqdm=False)]
    assert token_ids[0][0] == ids[0][7] and set(token_ids[0]) <= set(ids[0][7:12])
    assert token_ids[1][0] == ids[1][2] and not set(token_ids[1]) & set(ids[1][:2])
    assert token_ids[2] == [0] * 8 and token_ids[3][0] == ids[3][5] and token_ids[4] == [17] * 8
    assert token_ids[5] == free[5].token_ids


def test_banned_sequences_follow_what_comes(llm: LLM) -> None:
    (inputs,) = prompts(1)
    free = llm.generate([inputs], greedy(max_tokens=6), use_tqdm=False)[0].outputs[0].token_ids
    words = [free[:3], [free[0], 5, 6]]
    request = Request("x", inputs["prompt_token_ids"], greedy(max_tokens=6), bad_words=words)
    llm.engine.add(request)
    while llm.engine.has_work():
        llm.engine.step()
    token_ids = request.output_token_ids
    assert token_ids[:2] == free[:2] and token_ids[2] != free[2] and len(token_ids) == 6


def reference(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities after each of the ids, [len(ids), vocabulary], by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llm.source, dtype=torch.float32)  # type: ignore[attr-defined]
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()


def test_prompts_are_scored_as_transformers_does(llm: LLM) -> None:
    """Prompts of more tokens than a step, batched with generating requests; then again from a warm prefix cache."""
    rng = np.random.default_rng(SEED)
    requests = [{"prompt_token_ids": rng.integers(3, 320, n).tolist()} for n in (70, 1, 2, 33, 9, 47, 16)]
    params = [greedy(prompt_logprobs=k, temperature=t) for k, t in zip((3, 0, 1, None, 20, None, 5), (0.0, 1.0) * 4)]
    first = llm.generate(requests, params, use_tqdm=False)
    again = llm.generate(requests[:1], params[:1], use_tqdm=False)
    assert again[0].num_cached_tokens == 0 and again[0].prompt_logprobs is not None
    for output, one in [*zip(first, params), (again[0], params[0])]:
        ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
        assert len(output.outputs[0].token_ids) == 8
        if one.prompt_logprobs is None:
            assert logprobs is None
            continue
        assert logprobs is not None and logprobs[0] is None and len(logprobs) == len(ids)
        want = reference(llm, ids)
        for i, row in enumerate(logprobs[1:]):
            assert row is not None and next(iter(row)) == ids[i + 1]
            order = np.argsort(-want[i], kind="stable")[: one.prompt_logprobs]
            assert set(row) == {ids[i + 1], *order.tolist()}
            for token, found in row.items():
                assert abs(found.logprob - want[i, token]) < 1e-3
                assert found.rank == int((want[i] > want[i, token]).sum()) + 1


def test_scoring_a_prompt_changes_no_token(llm: LLM) -> None:
    """Nor are those of other requests, nor those of several outputs of a prompt, whose scores are returned once."""
    inputs = prompts(4)
    draw = {"temperature": 0.9, "seed": 11, "n": 3}
    plain = [greedy(), greedy(**draw), greedy(frequency_penalty=0.5), greedy()]
    scored = [greedy(prompt_logprobs=2), greedy(prompt_logprobs=0, **draw), plain[2], plain[3]]
    want, got = (llm.generate(inputs, params, use_tqdm=False) for params in (plain, scored))
    tokens = [[[o.token_ids for o in one.outputs] for one in outputs] for outputs in (want, got)]
    assert tokens[0] == tokens[1]
    assert [one.prompt_logprobs is not None for one in got] == [True, True, False, False]
