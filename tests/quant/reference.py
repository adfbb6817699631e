"""A plain decoder of every fixture, written from the formats' descriptions: it shares no code with the compiler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

Tensors = Mapping[str, torch.Tensor]

ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]


def stream(x: torch.Tensor, bits: int, axis: int, count: int) -> torch.Tensor:
    """`count` values of `bits` bits from int32 words along `axis`, least significant first, also over word borders."""
    words = x.movedim(axis, -1).to(torch.int64) & 0xFFFFFFFF
    flat = ((words[..., None] >> torch.arange(32)) & 1).flatten(-2)[..., : count * bits].unflatten(-1, (count, bits))
    return (flat << torch.arange(bits)).sum(-1).movedim(-1, axis)


def groups(k: int, size: int) -> torch.Tensor:
    """The group of each of k columns."""
    return torch.arange(k) // (size if size > 0 else k)


def gptq(t: Tensors, bits: int, size: int, v1: bool) -> torch.Tensor:
    n, k = t["qweight"].shape[1], t["qweight"].shape[0] * 32 // bits
    group = t["g_idx"].long() if "g_idx" in t else groups(k, size)
    words = t["qzeros"].to(torch.int64)
    if v1 and bits in ONES:
        words = (words + ONES[bits]) & 0xFFFFFFFF  # the writer subtracts from whole words: a zero of 0 borrows
    zero = stream(words, bits, 1, n)
    if v1 and bits not in ONES:
        zero = (zero + 1) & ((1 << bits) - 1)
    return ((stream(t["qweight"], bits, 0, k) - zero[group]) * t["scales"].float()[group]).T


def awq(t: Tensors, size: int) -> torch.Tensor:
    k, n = t["qweight"].shape[0], t["qweight"].shape[1] * 8

    def columns(x: torch.Tensor) -> torch.Tensor:
        return stream(x, 4, 1, n).unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1)

    group = groups(k, size)
    return ((columns(t["qweight"]) - columns(t["qzeros"])[group]) * t["scales"].float()[group]).T


def packed_int(t: Tensors, bits: int, size: int) -> torch.Tensor:
    n, k = t["weight_shape"].tolist()
    group = groups(k, size)
    zero = 1 << (bits - 1)
    if "weight_zero_point" in t:
        zero = stream(t["weight_zero_point"], bits, 0, n)[:, group]
    return (stream(t["weight_packed"], bits, 1, k) - zero) * t["weight_scale"].float()[:, group]


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two values a byte, the low four bits first."""
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def nvfp4(t: Tensors) -> torch.Tensor:
    scale = t["weight_scale"].float() / t["weight_global_scale"]
    return e2m1(t["weight_packed"]) * scale.repeat_interleave(16, -1)


def scaled(w: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None) -> torch.Tensor:
    """w [N, K] times a scale of a tensor, of rows [N] or [N, 1], of groups [N, G], or of tiles."""
    w, (n, k) = w.float(), w.shape[-2:]
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = e8m0(scale)
    scale = scale.float()
    if scale.numel() == 1:
        return w * scale.reshape(())
    if block is not None:
        scale = scale.repeat_interleave(block[0], -2)[..., :n, :].repeat_interleave(block[1], -1)[..., :k]
        return w * scale
    scale = scale.reshape(n, -1)
    return w * scale.repeat_interleave(k // scale.shape[1], 1)


def bnb4(t: Tensors) -> torch.Tensor:
    (state,) = (v for k, v in t.items() if k.startswith("weight.quant_state"))
    facts = json.loads(bytes(state.tolist()))
    absmax = t["weight.absmax"]
    if "weight.nested_absmax" in t:
        codes, nested = absmax.long(), t["weight.nested_absmax"]
        absmax = t["weight.nested_quant_map"][codes] * nested.repeat_interleave(facts["nested_blocksize"])[: len(codes)]
        absmax = absmax + facts["nested_offset"]
    packed = t["weight"].flatten()
    values = t["weight.quant_map"][torch.stack([packed >> 4, packed & 15], -1).flatten().long()]
    return (values * absmax.repeat_interleave(facts["blocksize"])[: len(values)]).reshape(facts["shape"])


def gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, N, G, 16] bytes and [E, N, G] exponents to [E, N, K]."""
    return (e2m1(blocks) * e8m0(scales)[..., None]).flatten(-2)


def by_dynamic(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """GPTQ's `dynamic`: the first pattern that matches gives other numbers."""
    for pattern, other in (config.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
            return {**config, **other}
    return config


def by_extra(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """AutoRound's `extra_config`: the exact name, or a regular expression."""
    extra = config.get("extra_config") or {}
    other = extra.get(name) or next((v for p, v in extra.items() if re.fullmatch(p, name)), {})
    return {**config, **other}


def args_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """compressed-tensors: the arguments of the weights of the first group whose target is the module's name."""
    found = {}
    for group in config["config_groups"].values():
        for target in group["targets"]:
            if (target.startswith("re:") and re.match(target[3:], name)) or target == name:
                return group["weights"]
            if target == "Linear":
                found = group["weights"]
    return found


def packing(config: Mapping[str, Any]) -> str:
    """Which of the word packings a file has: gptq, gptq_v2 or awq."""
    if config["quant_method"] == "auto-round":
        return {"auto_gptq": "gptq", "auto_awq": "awq"}[config["packing_format"].partition(":")[2]]
    if config["quant_method"] == "awq":
        return "awq"
    return config.get("checkpoint_format") or "gptq"


def words(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    own = by_extra(by_dynamic(config, name), name)
    size = own.get("group_size", own.get("q_group_size"))
    kind = packing(config)
    return awq(t, size) if kind == "awq" else gptq(t, own.get("bits", 4), size, v1=kind == "gptq")


def fp8(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    scale = t["weight_scale_inv"] if "weight_scale_inv" in t else t["weight_scale"]
    block = config.get("weight_block_size")
    if "weight_scale_2" in t:  # ModelOpt's 4-bit floats
        return e2m1(t["weight"]) * (scale.float() * t["weight_scale_2"]).repeat_interleave(16, -1)
    if scale.ndim == 4:  # ModelOpt's tiles
        scale, block = scale[:, 0, :, 0], (128, 128)
    if config["quant_method"] == "compressed-tensors":
        block = args_of(config, name).get("block_structure")
    tiles = block and scale.numel() > 1 and scale.ndim > 1
    return scaled(t["weight"], scale, tuple(block) if tiles else None)


def packed(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    if t["weight_packed"].dtype == torch.int32:
        args = args_of(config, name)
        return packed_int(t, args["num_bits"], args.get("group_size") or 0)
    return nvfp4(t) if "weight_global_scale" in t else scaled(e2m1(t["weight_packed"]), t["weight_scale"])


def natural(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Scales [n, k] out of tiles of 128 x 4, each of which is stored as 32 x 16."""
    rows, columns = torch.arange(n)[:, None], torch.arange(k)[None]
    at = ((rows // 128) * -(-k // 4) + columns // 4) * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4
    return scale.flatten()[at]


def tensor_core_tiles(t: Tensors, facts: Mapping[str, Any]) -> torch.Tensor:
    """torchao's Int4TilePackedTo4dTensor: the place of each element in the words [n / 8, k / 128, 32, 4]."""
    (n, k), size = facts["shape"], facts["block_size"][1]
    r, c = torch.arange(n)[:, None], torch.arange(k)[None]
    lane, word = r % 8 * 4 + c % 8 // 2, c % 128 // 32
    shift = 4 * (c % 2 * 4 + c % 32 // 16 * 2 + c % 16 // 8)
    code = (t["_weight_qdata"][r // 8, c // 128, lane, word].to(torch.int64) >> shift) & 15
    scale, zero = t["_weight_scale_and_zero"].float().transpose(0, 1)[:n, groups(k, size)].unbind(-1)
    return (code - 8) * scale + zero


def torchao(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    if "_weight_scale_and_zero" in t:
        return tensor_core_tiles(t, json.loads(config["described"][f"{name}.weight"])["_data"])
    code, scale = t["_weight_qdata"], t["_weight_scale"]
    n, k = code.shape
    if code.dtype == torch.uint8:  # 4-bit floats
        scale = natural(scale.float(), n, k // 8) * t["_weight_per_tensor_scale"]
        return e2m1(code) * scale.repeat_interleave(16, 1)
    if scale.dtype == torch.float8_e8m0fnu:
        return code.float() * e8m0(natural(scale.view(torch.uint8), n, k // 32)).repeat_interleave(32, 1)
    rows, columns = n // scale.shape[0], k // scale.shape[1]
    zero = t.get("_weight_zero_point", torch.zeros(scale.shape)).float()
    scale, zero = (x.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1) for x in (scale, zero))
    return (code.float() - zero) * scale


def hqq(t: Tensors) -> torch.Tensor:
    bits = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}[bytes(t["packing"].tolist()).decode()]
    fields = 10 if bits == 3 else 8 // bits
    parts = [(t["W_q"] >> bits * i) & ((1 << bits) - 1) for i in reversed(range(fields))]
    n, k = t["shape"].tolist()
    axis, scale, zero = int(t["axis"]), t["scale"].float(), t["zero"].float()
    rows = scale.shape[0] if axis == 1 else n * k // scale.shape[1]
    return ((torch.cat(parts)[:rows].float() - zero) * scale).reshape(n, k)


def ternary(t: Tensors) -> torch.Tensor:
    """BitNet's class bitlinear, whose scale is a divisor."""
    return (torch.cat([(t["weight"] >> 2 * i) & 3 for i in range(4)]).float() - 1) / t["weight_scale"].float()


def quanto(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    scale = t["weight._scale"].float()
    if "weight._data" in t:
        return t["weight._data"].float() * scale
    packed, bits = t["weight._data._data"], int(config["types"][name]["weights"].removeprefix("qint"))
    planes = [(packed >> bits * i) & ((1 << bits) - 1) for i in range(8 // bits)]
    code = torch.cat(planes)[: len(scale)].float()
    return (code * scale - t["weight._shift"].float()).reshape(config["shapes"][f"{name}.weight"])


def mlx(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    own = config.get(name, config)
    bits, size, scale = own["bits"], own["group_size"], t["scales"]
    code = stream(t["weight"].view(torch.int32), bits, 1, t["weight"].shape[1] * 32 // bits)
    offset = t.get("biases", t.get("qbiases"))
    if offset is not None:
        return code.float() * scale.float().repeat_interleave(size, 1) + offset.float().repeat_interleave(size, 1)
    factor = scale.view(torch.float8_e4m3fn).float() if own["mode"] == "nvfp4" else e8m0(scale)
    value = E2M1[code] if bits == 4 else code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return value * factor.repeat_interleave(size, 1)


def gemma(t: Tensors, config: Mapping[str, Any], name: str) -> torch.Tensor:
    code, scale = (t["embedding_quantized"], t["embedding_scale"]) if "embedding_scale" in t else (
        t["weight"], t["weight_scale"]
    )  # fmt: skip
    rules = config["module_quant_configs"].items()
    bits = next((rule["num_bits"] for pattern, rule in rules if re.search(pattern, name)), config["num_bits"])
    if bits < 8:
        fields = [(code >> bits * i) & ((1 << bits) - 1) for i in range(8 // bits)]
        code = torch.stack(fields, -1).flatten(-2).float() - (1 << (bits - 1))
        code = code[:, : config["shapes"][f"{name}.weight"][1]]
    return code.float() * scale.repeat_interleave(code.shape[1] // scale.shape[1], 1)


Decoder = Callable[[Tensors, Mapping[str, Any], str], torch.Tensor]


def decoder(t: Tensors) -> Decoder | None:
    """How a module with these tensors is decoded; None if it is not quantised."""
    if "qweight" in t:
        return words
    if "weight_packed" in t:
        return packed
    if "_weight_qdata" in t:
        return torchao
    if "W_q" in t:
        return lambda t, *_: hqq(t)
    if "embedding_scale" in t or "output_activation_scale" in t:
        return gemma
    if "weight_scale" in t and t["weight"].dtype == torch.uint8 and t["weight_scale"].numel() == 1:
        return lambda t, *_: ternary(t)
    if "weight_scale" in t or "weight_scale_inv" in t:
        return fp8
    if "weight._scale" in t:
        return quanto
    if "scales" in t:
        return mlx
    if "SCB" in t:
        return lambda t, *_: t["weight"].float() * t["SCB"][:, None] * (1 / 127)  # in this order
    if "weight.absmax" in t:
        return lambda t, *_: bnb4(t)
    return None


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "oracle.safetensors":
            with safe_open(path, "pt") as f:
                found |= {k: f.get_tensor(k) for k in f.keys()}
    return found


def modules(stored: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each module, by the rest of their names."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in stored.items():
        module, _, rest = key.partition(".weight.") if ".weight." in key else key.rpartition(".")
        found.setdefault(module, {})["weight." + rest if ".weight." in key else rest] = value
    return found


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a checkpoint's model, by name."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def decode(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 weight of every quantised module, [N, K]; of gpt-oss's experts [E, N, K]."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    method = config.get("quant_method", "")
    if (listed := folder / "quanto_qmap.json").exists():
        config["types"] = json.loads(listed.read_text())
    if listed.exists() or method == "gemma":
        config["shapes"] = shapes(folder)
    if method == "torchao":
        with safe_open(folder / "model.safetensors", "pt") as f:
            config["described"] = f.metadata()
    out = {}
    for name, t in modules(checkpoint(folder)).items():
        for key in [k for k in t if k.endswith("_blocks")]:
            stem = key.removesuffix("_blocks")
            out[f"{name}.{stem}"] = gpt_oss(t[key], t[stem + "_scales"])
        if how := decoder(t):
            out[name] = how(t, config, name).float().contiguous()
    return out
