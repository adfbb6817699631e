"""Writes quantised checkpoints of random models by hand, in layouts and mixtures of layouts that no fixture has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quant.make.common import base
from quant.reference import E2M1, ONES
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
# Encodes a weight [n, k]: the stored tensors by the last part of their names, and the dequantised weight in float32.
Encode = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
E4M3 = torch.float8_e4m3fn
AWQ_SHIFTS = [0, 4, 1, 5, 2, 6, 3, 7]


def stream(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Pack codes into int32 words along an axis, least significant bit first; the last word is filled up with zeros."""
    flat = ((codes.to(torch.int64).movedim(axis, -1)[..., None] >> torch.arange(bits)) & 1).flatten(-2)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (flat << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32).movedim(-1, axis)


def rounded(
    w: torch.Tensor,
    bits: int,
    size: int,
    group: torch.Tensor | None = None,
    sym: bool = True,
    dtype: Any = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to unsigned codes: codes [n, k], scales and zero points [n, groups], and the dequantised weight.

    size: columns of a group, -1 for all. group: the group of each column, runs of `size` by default.
    """
    n, k = w.shape
    group = torch.arange(k) // (size if size > 0 else k) if group is None else group
    count, top = int(group.max()) + 1, (1 << bits) - 1
    low, high = torch.zeros(n, count), torch.zeros(n, count)
    for g in range(count):
        columns = w[:, group == g].float()
        low[:, g], high[:, g] = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
    if sym:
        scale = (torch.maximum(-low, high) / (top / 2)).clamp(min=1e-4).to(dtype)
        zero = torch.full_like(low, 1 << (bits - 1))
    else:
        scale = ((high - low) / top).clamp(min=1e-4).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top)
    code = (w.float() / scale.float()[:, group] + zero[:, group]).round().clamp(0, top)
    return code, scale, zero, (code - zero[:, group]) * scale.float()[:, group]


def gptq(
    bits: int = 4, size: int = 32, sym: bool = True, v1: bool = True, order: str = "", dtype: Any = torch.float16
) -> Encode:
    """GPTQ's layout. order: "" for no g_idx, "runs" for one that is sorted, "shuffled" for groups of any columns."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        k = w.shape[1]
        group = torch.arange(k) // (size if size > 0 else k)
        if order == "shuffled":
            group = group[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        code, scale, zero, value = rounded(w, bits, size, group, sym, dtype)
        zeros = stream(zero.T, bits, 1)
        if v1 and bits in ONES:
            words = (zeros.to(torch.int64) - ONES[bits]) & 0xFFFFFFFF
            zeros = (words - ((words >> 31) << 32)).to(torch.int32)
        elif v1:
            zeros = stream((zero.T - 1) % (1 << bits), bits, 1)
        parts = {"qweight": stream(code.T, bits, 0), "qzeros": zeros, "scales": scale.T}
        return parts | ({"g_idx": group.to(torch.int32)} if order else {}), value

    return encode


def awq(size: int = 32, dtype: Any = torch.float16) -> Encode:
    """The layout "gemm" of AutoAWQ."""

    def words(x: torch.Tensor) -> torch.Tensor:
        eight = x.to(torch.int64).unflatten(1, (-1, 8))
        packed = sum(eight[..., i] << (4 * shift) for i, shift in enumerate(AWQ_SHIFTS))
        return (packed - ((packed >> 31) << 32)).to(torch.int32)

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, value = rounded(w, 4, size, sym=False, dtype=dtype)
        return {"qweight": words(code.T), "qzeros": words(zero.T), "scales": scale.T}, value

    return encode


def packed(bits: int = 4, size: int = 32, sym: bool = True, dtype: Any = torch.bfloat16) -> Encode:
    """pack-quantized of compressed-tensors."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, value = rounded(w, bits, size, sym=sym, dtype=dtype)
        parts = {"weight_packed": stream(code, bits, 1), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
        return parts | ({} if sym else {"weight_zero_point": stream(zero, bits, 0)}), value

    return encode


def actorder(bits: int, size: int, words: bool, sym: bool = True) -> Encode:
    """Groups of any columns in old files of compressed-tensors: pack-quantized (`words`) or int-quantized."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        group = (torch.arange(k) // size)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        code, scale, zero, value = rounded(w, bits, size, group, sym, torch.bfloat16)
        parts = {"weight_scale": scale, "weight_g_idx": group.to(torch.int32)}
        if words:
            parts |= {"weight_packed": stream(code, bits, 1), "weight_shape": torch.tensor([n, k])}
            return parts | ({} if sym else {"weight_zero_point": stream(zero, bits, 0)}), value
        middle = 1 << (bits - 1)
        parts["weight"] = (code - middle).to(torch.int8)
        return parts | ({} if sym else {"weight_zero_point": (zero - middle).to(torch.int8)}), value

    return encode


def int8(dtype: Any = torch.bfloat16) -> Encode:
    """int-quantized of compressed-tensors, a scale for each row."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (w.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-4).to(dtype)
        code = (w.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return {"weight": code, "weight_scale": scale}, code.float() * scale.float()

    return encode


def fp8(block: tuple[int, int] | str = "tensor", name: str = "weight_scale_inv", dtype: Any = torch.float32) -> Encode:
    """8-bit floats with a scale of the "tensor", of each "channel", or of tiles; a weight may be a stack of experts."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape[-2:]
        rows, columns = {"tensor": (n, k), "channel": (1, k)}[block] if isinstance(block, str) else block
        r, c = -(-n // rows), -(-k // columns)
        whole = torch.zeros(*w.shape[:-2], r * rows, c * columns)
        whole[..., :n, :k] = w.float()
        tiles = whole.unflatten(-1, (c, columns)).unflatten(-3, (r, rows))
        scale = (tiles.abs().amax((-3, -1)) / 448).clamp(min=1e-6).to(dtype)
        spread = scale.float().repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(columns, -1)[..., :k]
        code = (w.float() / spread).to(E4M3)
        stored = scale.reshape(()) if block == "tensor" and w.ndim == 2 else scale
        return {"weight": code, name: stored}, code.float() * spread

    return encode


def nvfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4-bit floats of ModelOpt: a scale for each 16 columns in 8-bit floats, times one of the tensor."""
    whole = w.float().abs().amax() / (6 * 448)
    scale = (w.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 / whole).to(E4M3)
    spread = (scale.float() * whole).repeat_interleave(16, 1)
    distance = ((w.float() / spread.clamp(min=1e-30))[..., None] - E2M1).abs()
    code = distance.argmin(-1)
    packed = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}, E2M1[code] * spread


def fp8_tiles(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """8-bit floats of ModelOpt with a scale for each tile of 128 x 128, of four axes."""
    parts, value = fp8((128, 128), "weight_scale")(w)
    return {**parts, "weight_scale": parts["weight_scale"][:, None, :, None]}, value


def fp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """nvfp4-pack-quantized of compressed-tensors: the number that all scales share is a divisor."""
    divisor = 448 * 6 / w.float().abs().amax()
    scale = (w.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * divisor).clamp(min=2**-9).to(E4M3)
    spread = (scale.float() / divisor).repeat_interleave(16, 1)
    code = ((w.float() / spread)[..., None] - E2M1).abs().argmin(-1)
    words = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    parts = {"weight_packed": words, "weight_scale": scale, "weight_global_scale": divisor.reshape(1)}
    return parts | {"input_global_scale": torch.ones(1)}, E2M1[code] * spread


def mxfp8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """8-bit floats with a power of two for each 32 columns."""
    power = torch.log2(w.float().unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-9) / 448).ceil()
    spread = torch.exp2(power).repeat_interleave(32, 1)
    code = (w.float() / spread).to(E4M3)
    return {"weight": code, "weight_scale": (power + 127).to(torch.uint8)}, code.float() * spread


def transposed(how: Encode) -> Encode:
    """The encoding of the transpose [n, k] of weights that the model holds as [k, n]."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, value = how(w.T.contiguous())
        return parts, value.T.contiguous()

    return encode


def with_parts(how: Encode, **more: torch.Tensor) -> Encode:
    """An encoding with other tensors beside those of the weight."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, value = how(w)
        return parts | {name: x.clone() for name, x in more.items()}, value

    return encode


@dataclass(frozen=True)
class Handmade:
    """A checkpoint that was written: its folder, and transformers' float32 model with the dequantised weights."""

    folder: Path
    model: Any


def write(
    folder: Path,
    encode: Callable[[str], Encode | None],
    config: Mapping[str, Any],
    source: str = "llama",
    shards: int = 1,
    key: str = "quantization_config",
    beside: Mapping[str, Any] | None = None,
) -> Handmade:
    """Quantise a base model into `folder`.

    encode: the encoding of a module's weight, or None to store it in bfloat16; experts of a mixture are stored one by
    one unless `...mlp.experts.gate_up_proj` (or down_proj) has one. config: stored in config.json as `key`. shards:
    files of weights. beside: other JSON files.
    """
    model = base(source, torch.float32)
    out: Tensors = {}
    for name, p in sorted(model.named_parameters()):
        p.data = p.data.to(torch.bfloat16).float()
        if p.ndim == 3 and ".experts." in name and encode(name) is None:
            _experts(out, name, p, encode)
        else:
            _tensor(out, name, p, encode)
    folder.mkdir(parents=True, exist_ok=True)
    facts = json.loads(model.config.to_json_string()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(facts | ({key: config} if config else {})))
    for file, content in (beside or {}).items():
        (folder / file).write_text(json.dumps(content))
    _save(folder, {k: v.contiguous() for k, v in out.items()}, shards)
    return Handmade(folder, model.eval())


def _tensor(out: Tensors, name: str, p: Any, encode: Callable[[str], Encode | None]) -> None:
    module = name.removesuffix(".weight")
    how = encode(module) if p.ndim > 1 else None
    if how is None:
        out[name] = p.data.to(torch.bfloat16)
        return
    parts, p.data = how(p.data)
    stem = f"{module}." if name != module else f"{module}_"
    out |= {name if part == "weight" else stem + part: value for part, value in parts.items()}


def _experts(out: Tensors, name: str, p: Any, encode: Callable[[str], Encode | None]) -> None:
    stem, _, kind = name.rpartition(".")
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for e, w in enumerate(p.data):
        for part, piece in zip(names, w.chunk(len(names))):
            own = torch.nn.Parameter(piece.clone())
            _tensor(out, f"{stem}.{e}.{part}.weight", own, encode)
            piece.copy_(own.data)


def _save(folder: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        save_file({n: tensors[n] for n, at in where.items() if at == file}, folder / file, {"format": "pt"})
    size = sum(v.nbytes for v in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
