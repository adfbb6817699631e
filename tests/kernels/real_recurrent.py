"""Nodes for the kernels of recurrent layers, at the sizes of Qwen3-Next, Kimi-Linear and Jamba. Data only."""

from __future__ import annotations

from kernels.cases import Text

_STEP = "i32[R]; i32[R+1]"
_MEMORY = "state f32[256, 32, 128, 128]"
_CHANNELS = "state f32[4096, 8192, 16, 1]"
_RING = "state bf16[256, 8, 8192]"
_FACTORS = "f32[T, 32, 2, 32]"
_LOG = "state i32[256]; state f32[256, 4, 6208]"


def _inputs(tokens: str) -> str:
    """Queries, keys, values and decays."""
    return f"bf16[{tokens}, 16, 128]; bf16[{tokens}, 16, 128]; bf16[{tokens}, 32, 128]; f32[{tokens}, 32]"


RECURRENT = {
    "row_conv": tuple(
        Text(f"bf16[{t}, 8192]; bf16[8192, 4]; {_RING}; {_STEP}; i32[{t}]", "row_conv", f"bf16[{t}, 8192], {_RING}")
        for t in ("T", "R")
    ),
    "row_recurrence": (
        Text(
            f"{_inputs('T')}; {_MEMORY}; {_STEP}; i32[T]; f32[T, 32]", "row_recurrence", f"bf16[T, 32, 128], {_MEMORY}"
        ),
        Text(
            f"{_inputs('R')}; {_MEMORY}; {_STEP}; i32[R]; f32[R, 32]", "row_recurrence", f"bf16[R, 32, 128], {_MEMORY}"
        ),
        Text(
            f"{_inputs('T')}; {_MEMORY}; {_LOG}; {_STEP}; i32[T]; f32[T, 32]", "row_recurrence_draft",
            f"bf16[T, 32, 128], {_MEMORY}",
        ),
        Text(
            f"{_inputs('T')}; {_FACTORS}; {_MEMORY}; {_STEP}; i32[T]; f32[T, 32]", "chunk_recurrence {least=16}",
            f"bf16[T, 32, 128], {_MEMORY}",
        ),
        Text(
            f"{_inputs('T')}; {_FACTORS}; {_MEMORY}; {_LOG}; {_STEP}; i32[T]; f32[T, 32]",
            "chunk_recurrence_draft {least=16}", f"bf16[T, 32, 128], {_MEMORY}",
        ),
        # of Kimi-Linear-48B-A3B, and of Jamba's Mamba-1 layers
        Text(
            f"{'bf16[T, 32, 128]; ' * 3}f32[T, 4096]; {_MEMORY}; {_STEP}; i32[T]; f32[T, 32]", "row_recurrence",
            f"bf16[T, 32, 128], {_MEMORY}",
        ),
        Text(
            f"bf16[R, 1, 16]; bf16[R, 1, 16]; bf16[R, 8192, 1]; f32[R, 131072]; {_CHANNELS}; {_STEP}; i32[R]",
            "row_recurrence", f"bf16[R, 8192, 1], {_CHANNELS}",
        ),
    ),
    "chunk_factors": (
        Text(
            "bf16[T, 16, 128]; bf16[T, 16, 128]; f32[T, 32]; i32[R]; i32[R+1]; f32[T, 32]",
            "chunk_factors {chunk=32, least=16}", "f32[T, 32, 2, 32]",
        ),
    ),
    "row_log": (
        Text(
            f"bf16[T, 16, 128]; bf16[T, 32, 128]; f32[T, 32]; {_LOG}; {_STEP}; i32[T]; f32[T, 32]", "row_log",
            _LOG.replace(";", ","),
        ),
    ),
}  # fmt: skip
