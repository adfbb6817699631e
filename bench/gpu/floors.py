"""Lower bounds of a step's time: bytes over read bandwidth plus flops over the rate of products.

Every operator runs at its own limit, and operators do not overlap. Norms, activations, KV writes and launches are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.shapes import Shape

BYTES = 2  # of a bf16 weight


@dataclass(frozen=True)
class Roof:
    """Read bandwidth in byte/s and bf16 product rate in flop/s."""

    read: float
    product: float


H200 = Roof(4.65e12, 795e12)  # what a simple kernel and a library's 8192^3 product reached on one H200


def decode_seconds(shape: Shape, batch: int, context: int, roof: Roof = H200) -> float:
    """Return the seconds of a decode step of `batch` rows, each after `context` tokens."""
    kv = batch * context * shape.kv_bytes_per_token / roof.read
    attention = 4 * shape.layers * shape.heads * shape.head_dim * context * batch / roof.product
    return _products(shape, batch, roof) + _head(shape, batch, roof) + max(kv, attention)


def prefill_seconds(shape: Shape, tokens: int, roof: Roof = H200) -> float:
    """Return the seconds of one prompt, causal, with logits of its last token."""
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens**2 / roof.product
    return _products(shape, tokens, roof) + _head(shape, 1, roof) + attention


def offline_tokens_per_second(
    shape: Shape, prompt: int = 512, new: int = 256, rows: int = 256, roof: Roof = H200
) -> float:
    """Return the output tokens per second of many requests, `rows` at once: a prompt's arithmetic, and a row's share of
    each step.
    """
    prefill = 2 * shape.layer_parameters * prompt / roof.product / shape.product_rate
    prefill += 2 * shape.layers * shape.heads * shape.head_dim * prompt**2 / roof.product
    return 1 / (prefill / new + decode_seconds(shape, rows, prompt + new // 2, roof) / rows)


def launch_seconds(flops: float, nbytes: float, roof: Roof = H200) -> float:
    """Return the seconds of one launch: the larger of its compute and memory time."""
    return max(flops / roof.product, nbytes / roof.read)


def _products(shape: Shape, tokens: int, roof: Roof) -> float:
    arithmetic = 2 * shape.layer_parameters * tokens / roof.product / shape.product_rate
    return max(shape.weight_bytes * shape.parameters_read(tokens) / roof.read, arithmetic)


def _head(shape: Shape, rows: int, roof: Roof) -> float:
    n = shape.vocab * shape.hidden
    return max(BYTES * n / roof.read, 2 * n * rows / roof.product)
