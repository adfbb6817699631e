"""Paged attention on the CPU: instantiates the C++ template in llmc_attention.h with a node's constants."""

from __future__ import annotations

from typing import ClassVar

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, CppKernel, pointers
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

MAX_HEAD = 512
MAX_LATENT = 1024


class PagedAttention(CppKernel):
    """Flash attention for any mix of prompt chunks and decoding rows, processing the heads of a group together."""

    constant_reduction_order = "tiles of keys at multiples of kt"
    headers = ("llmc_attention.h",)
    latent: ClassVar[bool] = False  # values are parts of keys; the rotary parts of queries are an operand of their own
    alibi: ClassVar[bool] = False  # the last operand is the slopes of a bias by distance, not sinks

    def heads(self, node: Node) -> tuple[int | None, ...]:
        """Return (query heads, key heads, tokens per page, elements of a key, of a value); None for sizes that vary."""
        q, kv = node.operands[0].type, node.operands[1].type
        return tuple(d.const for d in (q.shape[1], kv.shape[2], kv.shape[3], q.shape[2], q.shape[2]))

    def reject(self, node: Node, target: Target) -> str | None:
        floats = [node.operands[i].type for i in (0, 1, 6) if i < len(node.operands)]
        if bad := next((t for t in floats if t.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        if node.attrs.get("least", 1) > 1:
            return "it does not support skipping rows (least > 1)"
        sizes = self.heads(node)
        if None in sizes:
            return "heads, page and head size must be constant"
        h, g, _, d, _ = (n or 0 for n in sizes)
        if h % g:
            return f"{h} query heads are not a multiple of {g} key heads"
        return f"head size {d} is above {MAX_HEAD}" if d > MAX_HEAD else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the tile sizes to use, derived from the target's registers and caches.

        nv: vectors per panel. mr: rows per tile of a product. br: query rows per block. kt: tokens per tile of keys.
        """
        lanes = target.vector // 4
        mr = {16: 12, 8: 6}.get(lanes, 4)
        size = self.heads(node)[3] or 0  # tiles of queries, keys and values fit L2
        if size <= 128:
            br, kt = 192, 256
        else:
            br, kt = (192, 128) if size <= 256 else (96, 64)
        return [{"nv": 2, "mr": mr, "br": br, "kt": kt}]

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        """Return the bytes of `attend<Shape>::SCRATCH` in llmc_attention.h, which a static_assert compares."""
        rows, tile_rows, keys = schedule["br"], schedule["mr"], schedule["kt"]
        key_size, value_size = (n or 1 for n in self.heads(node)[3:])
        q, kv = node.operands[0].type, node.operands[1 + self.latent].type
        pairs = q.dtype == kv.dtype == "bf16" and target.vector == 64 and target.has("avx512_bf16")
        item, pair = (2, 2) if pairs else (4, 1)  # bytes of a factor, and factors that an instruction reads together
        panel = schedule["nv"] * target.vector // 4
        padded_key, padded_value = -(-key_size // pair) * pair, -(-value_size // panel) * panel
        parts = {
            "queries": rows * padded_key * item,
            "sums": padded_value * rows * 4,
            "logits": keys * tile_rows * 4,
            "weights": keys * tile_rows * item,
            "keys": keys * padded_key * item,
            "values": keys * padded_value * item,
            "pointers": keys * 8,
            "zeros": key_size * DTYPES[kv.dtype].bits // 8,
        }
        per_row = (3 + self.alibi) * (-(-rows * 4 // 64) * 64)  # maximum, sum and position; with ALiBi the slope
        return D(sum(-(-n // 64) * 64 for n in parts.values()) + per_row)

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        h, g, page, d, e = self.heads(node)
        s, a = schedule, node.attrs
        align = s["kt"] if target.deterministic else 1
        q, kv = _ctype(node, 0), _ctype(node, 1 + self.latent)
        sinks = "" if self.latent or self.alibi else _ctype(node, 6)
        return (
            f"struct Shape {{\n  typedef {q or 'float'} Q;\n  typedef {kv or 'float'} KV;\n"
            f"  typedef {sinks or 'float'} S;\n"
            f"  static constexpr int64_t H = {h}, G = {g}, D = {d}, E = {e}, PAGE = {page};\n"
            f"  static constexpr int64_t WINDOW = {a.get('window', 0)};\n"
            f"  static constexpr int NV = {s['nv']}, MR = {s['mr']};\n"
            f"  static constexpr int64_t BR = {s['br']}, KT = {s['kt']}, ALIGN = {align};\n"
            f"  static constexpr float SCALE = {a['scale']!r}f, SOFTCAP = {a.get('softcap', 0.0)!r}f;\n"
            f"  static constexpr bool SINKS = {'true' if sinks else 'false'};\n"
            f"  static constexpr bool LATENT = {'true' if self.latent else 'false'};\n"
            f"  static constexpr bool ALIBI = {'true' if self.alibi else 'false'};\n}};\n"
            f'static_assert(attend<Shape>::SCRATCH <= {self.scratch(node, schedule, target)}, "scratch");\n'
        )

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        types, pool = [v.type for v in node.operands], 1 + self.latent  # the index of the pool
        tokens = sizes(types[0].shape[0])
        count = sizes(types[pool + 2].shape[0])
        table = sizes(types[pool + 1].shape[1])
        last = "x6" if not self.latent and len(types) > 6 else "nullptr"
        sinks, slopes = ("nullptr", last) if self.alibi else (last, "nullptr")
        rotary = "x1" if self.latent else "nullptr"
        operands = ", ".join(["x0", rotary, *(f"x{pool + i}" for i in range(5)), sinks, slopes])
        return (
            f"{pointers(node)}\n"
            f"const attention_args a = {{{operands}, y0, {tokens}, {count}, {table}}};\n"
            "attention<Shape>(ctx, a);"
        )


class PagedLatentAttention(PagedAttention):
    """Flash attention over pages of latents, processing all heads of a token together: they share its key."""

    latent = True

    def heads(self, node: Node) -> tuple[int | None, ...]:
        q, pool = node.operands[0].type, node.operands[2].type
        return q.shape[1].const, 1, *(d.const for d in (*pool.shape[1:], q.shape[2]))

    def reject(self, node: Node, target: Target) -> str | None:
        if bad := next((v.type for v in node.operands[:3] if v.type.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        if None in (sizes := self.heads(node)):
            return "heads, page and sizes of keys must be constant"
        return f"the size of a key, {sizes[3]}, is above {MAX_LATENT}" if (sizes[3] or 0) > MAX_LATENT else None


class PagedAlibiAttention(PagedAttention):
    """Flash attention with a bias by distance."""

    alibi = True


def _ctype(node: Node, i: int) -> str:
    return CTYPES[node.operands[i].type.dtype] if i < len(node.operands) else ""


ATTENTION = PagedAttention("cpu/attention", ("paged_attention",))
ALIBI_ATTENTION = PagedAlibiAttention("cpu/alibi_attention", ("paged_alibi_attention",))
LATENT_ATTENTION = PagedLatentAttention("cpu/latent_attention", ("paged_latent_attention",))
