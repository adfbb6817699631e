"""Quantises a model to 4 bits, groups of 128, by a producer: `python producers.py PRODUCER MODEL TOKENS.pt OUT`.

TOKENS.pt has the windows of tokens [samples, length] of calibration, as `llmc.quant.make.texts.windows` draws them. Run
with the Python of the producer's own environment (README.md). Other settings are the producer's own defaults, but
auto-round sees 8 samples a step, as `llmc quantize` does. autoawq was made for GPUs: on a CPU, the copy
of the weights that it restores after each try of a scale would be the weights themselves, so copies are made here.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import torch
import transformers

GROUP = 128


def gptqmodel(model: str, tokens: torch.Tensor, out: str) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    made = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, device="cpu"))
    ones = torch.ones(tokens.shape[1], dtype=torch.int64)
    made.quantize([{"input_ids": row, "attention_mask": ones} for row in tokens], batch_size=1)
    made.save(out)


def autoawq(model: str, tokens: torch.Tensor, out: str) -> None:
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer

    search = AwqQuantizer._compute_best_scale

    def with_copies(self: Any, x: Any, w: Any, means: Any, module: Any, *rest: Any, **more: Any) -> Any:
        weights = module.state_dict
        module.state_dict = lambda: {name: value.clone() for name, value in weights().items()}
        try:
            return search(self, x, w, means, module, *rest, **more)
        finally:
            del module.state_dict

    AwqQuantizer._compute_best_scale = with_copies
    config = {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"}
    made = AutoAWQForCausalLM.from_pretrained(model, device_map="cpu", torch_dtype=torch.float32)
    made.model.config.use_cache = False  # or each try of a scale appends to the cache of the calibration
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{model}/tokenizer.json")
    length = tokens.shape[1]
    made.quantize(words, quant_config=config, calib_data=tokens.tolist(), max_calib_seq_len=length)
    made.save_quantized(out)


def auto_round(model: str, tokens: torch.Tensor, out: str) -> None:
    from auto_round import AutoRound

    made: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{model}/tokenizer.json")
    rounder = AutoRound(
        made, words, scheme="W4A16", group_size=GROUP, dataset=[row[None] for row in tokens], iters=200,
        batch_size=8, seqlen=tokens.shape[1], nsamples=len(tokens), device_map="cpu", enable_torch_compile=False,
    )  # fmt: skip
    rounder.quantize_and_save(f"{out}.parts", format="auto_round")
    shutil.move(next(Path(f"{out}.parts").glob("*/config.json")).parent, out)  # which is named after the model


if __name__ == "__main__":
    by = {"gptqmodel": gptqmodel, "autoawq": autoawq, "auto-round": auto_round}[sys.argv[1]]
    by(sys.argv[2], torch.load(sys.argv[3]), sys.argv[4])
