"""Real model configurations as data, and random checkpoints of their shapes, without tokenizers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

SHARD = 4 << 30  # of one safetensors file
_POOL = 1 << 24  # random values that all tensors are cut from


ARCHITECTURES = MappingProxyType(
    {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama": "LlamaForCausalLM",
    }
)


@dataclass(frozen=True)
class Shape:
    """A model's sizes as its config.json has them. `rope`: its rope_parameters.

    experts: of a mixture's layer. chosen: experts of a token. `intermediate` is then the size of one expert.
    `quant`: the recipe by which the layers' products are quantised when the model is compiled; "" for none.
    `kv_cache`: the dtype of the KV cache when the model is compiled, as for `llmc compile --kv-cache-dtype`.
    """

    name: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool
    rope: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    eps: float = 1e-6
    bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0
    quant: str = ""
    kv_cache: str = "auto"

    @staticmethod
    def quantised(shape: Shape, recipe: str, kv_cache: str = "auto") -> Shape:
        """Return the same model with quantised weights, under a different name."""
        name = f"{shape.name}-{recipe}{'' if kv_cache == 'auto' else f'-{kv_cache}kv'}"
        return replace(shape, name=name, quant=recipe, kv_cache=kv_cache)

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        out = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type, "dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.positions, "tie_word_embeddings": self.tied, "rms_norm_eps": self.eps,
            "rope_theta": self.rope["rope_theta"], "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        scaling = {k: v for k, v in self.rope.items() if k != "rope_theta"}
        if scaling:
            out["rope_scaling"] = scaling
        if self.model_type == "llama":
            out |= {"head_dim": self.head_dim, "attention_bias": self.bias, "mlp_bias": False}
        if self.experts:
            out |= {
                "num_experts": self.experts, "num_experts_per_tok": self.chosen, "norm_topk_prob": True,
                "moe_intermediate_size": self.intermediate, "decoder_sparse_step": 1, "mlp_only_layers": [],
            }  # fmt: skip
        if self.model_type in ("qwen3", "qwen3_moe"):
            out |= {"head_dim": self.head_dim, "attention_bias": self.bias}
        return out

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the name and shape of every tensor of the checkpoint."""
        d, f, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, d)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            for name, n in (("q", q), ("k", kv), ("v", kv)):
                yield f"{p}self_attn.{name}_proj.weight", (n, d)
                if self.bias:
                    yield f"{p}self_attn.{name}_proj.bias", (n,)
            yield f"{p}self_attn.o_proj.weight", (d, q)
            if self.qk_norm:
                yield f"{p}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{p}self_attn.k_norm.weight", (self.head_dim,)
            if self.experts:
                yield f"{p}mlp.gate.weight", (self.experts, d)
            for mlp in [f"mlp.experts.{e}" for e in range(self.experts)] or ["mlp"]:
                yield f"{p}{mlp}.gate_proj.weight", (f, d)
                yield f"{p}{mlp}.up_proj.weight", (f, d)
                yield f"{p}{mlp}.down_proj.weight", (d, f)
            yield f"{p}input_layernorm.weight", (d,)
            yield f"{p}post_attention_layernorm.weight", (d,)
        yield "model.norm.weight", (d,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, d)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(s)) for _, s in self.tensors())

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor in bf16."""
        return max(2 * int(np.prod(s)) for _, s in self.tensors())

    @property
    def read_per_token(self) -> int:
        """Bytes of bf16 weights that one decode step reads: all but the embedding's rows, the tied head included."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return 2 * (self.parameters - embedding)

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of the layers' products; scales of groups of 128 are included."""
        return {"": 2.0, "int4": 0.5 + 2 / 128}.get(self.quant, 1.0)

    @property
    def product_rate(self) -> float:
        """The rate of the layers' products relative to bf16."""
        return 2.0 if self.quant in ("fp8", "fp8-block", "w8a8") else 1.0

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the layers' products that a token passes through."""
        return self.dense_parameters + self.chosen * self.expert_parameters

    @property
    def dense_parameters(self) -> int:
        """Number of weights in the layers' products other than experts."""
        matrices = ((n, s) for n, s in self.tensors() if ".layers." in n and len(s) == 2)
        return sum(int(np.prod(s)) for n, s in matrices if ".experts." not in n)

    @property
    def expert_parameters(self) -> int:
        """Number of weights of one expert in every layer."""
        return 3 * self.layers * self.hidden * self.intermediate if self.experts else 0

    def parameters_read(self, tokens: int) -> float:
        """Return the number of weights that the layers' products read in one step, if experts are chosen evenly."""
        return self.dense_parameters + self.experts * self.chosen_share(tokens) * self.expert_parameters

    def chosen_share(self, tokens: int) -> float:
        """Return the share of a layer's experts that at least one token chooses, if they are chosen evenly."""
        return 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers."""
        return 2 * (1 if self.kv_cache == "fp8" else 2) * self.layers * self.kv_heads * self.head_dim

    @property
    def prefill_flops_per_token(self) -> int:
        """Twice the number of weights in the layers' products, without attention and the head (one row per prompt)."""
        return 2 * self.layer_parameters


LLAMA3_ROPE = MappingProxyType(
    {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}
)  # fmt: skip
QWEN25_05B = Shape(
    "qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, True,
    MappingProxyType({"rope_theta": 1e6}), bias=True,
)  # fmt: skip
LLAMA31_8B = Shape("llama-3.1-8b", "llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, False, LLAMA3_ROPE, eps=1e-5)
LLAMA33_70B = Shape("llama-3.3-70b", "llama", 8192, 28672, 80, 64, 8, 128, 128256, 131072, False, LLAMA3_ROPE, eps=1e-5)
LLAMA32_1B = Shape(
    "llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, True,
    MappingProxyType({**LLAMA3_ROPE, "factor": 32.0}), eps=1e-5,
)  # fmt: skip
QWEN3_06B = Shape(
    "qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, True,
    MappingProxyType({"rope_theta": 1e6}), qk_norm=True,
)  # fmt: skip
QWEN3_30B_A3B = Shape(
    "qwen3-30b-a3b", "qwen3_moe", 2048, 768, 48, 32, 4, 128, 151936, 40960, False,
    MappingProxyType({"rope_theta": 1e6}), qk_norm=True, experts=128, chosen=8,
)  # fmt: skip
# A model that compiles in seconds, for trying the benches.
SMALL = Shape(
    "small", "llama", 256, 512, 2, 4, 2, 64, 1024, 2048, False, MappingProxyType({"rope_theta": 1e4}), eps=1e-5
)
SHAPES = (QWEN25_05B, LLAMA31_8B, LLAMA33_70B, LLAMA32_1B, QWEN3_06B, QWEN3_30B_A3B, SMALL)


def folder(shape: Shape, root: Path) -> Path:
    """Write a model folder that contains only config.json, enough to trace and to run the passes."""
    path = root / f"{shape.name}-config"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return path


def checkpoint(shape: Shape, root: Path) -> Path:
    """A random bf16 checkpoint of the shape below `root`, written once: normal, std 0.02, norms near 1.

    Tensors are cuts of one drawn pool, so that billions of values cost seconds; no more than a shard's piece is held.
    """
    path = root / shape.name
    if (path / "config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    pool = _bf16(np.random.default_rng(0).standard_normal(_POOL, np.float32) * 0.02)
    shards = list(_shards(shape))
    index = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write(path / name, shard, pool)
        index |= {n: name for n, _ in shard}
    if len(shards) > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return path


def _shards(shape: Shape) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    shard: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for name, dims in shape.tensors():
        nbytes = 2 * int(np.prod(dims))
        if shard and size + nbytes > SHARD:
            yield shard
            shard, size = [], 0
        shard.append((name, dims))
        size += nbytes
    yield shard


def _write(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pool: np.ndarray) -> None:
    header, at = {}, 0
    for name, dims in tensors:
        end = at + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    ones = _bf16(1 + np.random.default_rng(1).standard_normal(1 << 16, np.float32) * 0.02)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i, (name, dims) in enumerate(tensors):
            remaining = int(np.prod(dims))
            source = ones if "norm" in name else pool
            offset = (i * 7919 * 64) % len(source)
            while remaining:
                piece = source[offset : offset + remaining]
                f.write(piece.data)
                remaining, offset = remaining - len(piece), 0


def _bf16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bfloat16 (nearest even)."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
