"""A contender of the generation bench in its own process: generates on request and reports seconds.

    python bench/contender.py KIND MODEL [CORE]      KIND: ours, eager, compiled, llamacpp

One JSON object a line: {"prompt": [ids], "new": n} on stdin; {"seconds": s, "tokens": [ids]} on stdout. Every kind is
greedy, batch 1, two threads; none stops early. With CORE, it runs on that core alone with one thread, and seconds are
of processor time. Peers are called through their ordinary Python interfaces, not through their own benchmark tools.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[int], int], list[int]]
CONTEXT = 640  # a static cache and a KV pool hold this many tokens


def ours(model: str) -> tuple[Generate, str]:
    """Our runtime over an artifact."""
    from llmc_runtime import LLM, SamplingParams, __version__

    llm = LLM(model, enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20, say=lambda line: None)

    def generate(prompt: list[int], new: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

    return generate, f"llmc_runtime {__version__}"


def transformers(model: str, compiled: bool) -> tuple[Generate, str]:
    """transformers in bf16: `generate` with its dynamic cache, or with a static cache and a compiled forward."""
    import torch
    import transformers as hf

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    hf.utils.logging.set_verbosity_error()
    net = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if compiled:
        options["past_key_values"] = hf.StaticCache(config=net.config, max_cache_len=CONTEXT)
        options["compile_config"] = hf.CompileConfig(mode="default")  # of the decode steps, as generate does it
        options["compile_config"]._compile_all_devices = True

    def generate(prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            if compiled:
                options["past_key_values"].reset()
            out = net.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
            )
        return out[0, len(prompt) :].tolist()

    return generate, f"transformers {hf.__version__}, torch {torch.__version__}"


def llamacpp(model: str) -> tuple[Generate, str]:
    """llama.cpp through its C interface: one batch for the prompt, then one token at a time, chosen by argmax."""
    import llama_cpp as lc
    import numpy as np

    silent = lc.llama_log_callback(lambda *_: None)  # C keeps the pointer to this object
    lc.llama_log_set(silent, None)
    lc.llama_backend_init()
    net = lc.llama_model_load_from_file(model.encode(), lc.llama_model_default_params())
    params = lc.llama_context_default_params()
    threads = len(os.sched_getaffinity(0))
    params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, 512, 512
    params.n_threads = params.n_threads_batch = threads
    ctx = lc.llama_init_from_model(net, params)
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(net))

    def generate(prompt: list[int], new: int) -> list[int]:
        lc.llama_memory_clear(lc.llama_get_memory(ctx), True)
        out: list[int] = []
        fed = prompt
        while True:
            ids = (lc.llama_token * len(fed))(*fed)
            assert lc.llama_decode(ctx, lc.llama_batch_get_one(ids, len(fed))) == 0
            logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(ctx, -1), (vocab,))
            out.append(int(logits.argmax()))
            if len(out) == new:
                return out
            fed = out[-1:]

    generate.keep = silent  # type: ignore[attr-defined]
    return generate, f"llama-cpp-python {lc.__version__}"


def main(kind: str, model: str, core: str = "") -> None:
    """Load the model, print the contender's name, then answer requests until stdin ends."""
    clock = time.process_time if core else time.perf_counter
    if core:
        os.sched_setaffinity(0, {int(core)})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    begin = time.perf_counter()
    if kind == "ours":
        generate, version = ours(model)
    elif kind == "llamacpp":
        generate, version = llamacpp(model)
    else:
        generate, version = transformers(model, kind == "compiled")
    print(json.dumps({"version": version, "seconds": time.perf_counter() - begin}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = clock()
        tokens = generate(request["prompt"], request["new"])
        print(json.dumps({"seconds": clock() - begin, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
