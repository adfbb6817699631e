"""Decode attention from a QKV product in Triton. The kernel is in `kernels/rope_attention.py`."""

from __future__ import annotations

from llmc.codegen.backends.triton.decode_attention import F8, MAX_HEAD, DecodeAttention, Problem
from llmc.codegen.backends.triton.rope import Head
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import ELEMENTS, FLOATS, Code, Unit, unsupported, unsupported_codes
from llmc.ir.graph import Node
from llmc.targets.target import Target

OPERANDS = "qkv_ptr - page_table_ptr rows_ptr positions_ptr scales_ptr cos_ptr sin_ptr query_gain_ptr key_gain_ptr"


class RopeAttention(DecodeAttention):
    """Norms, rotation, append and attention of one token and key head per program."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node) or unsupported_codes(node, target):
            return why
        kv = node.operands[1].type
        named = {name: v.type for name in ("x", "cos", "sin", "qw", "kw") if (v := node.operand(name))}
        if bad := next((t for t in named.values() if t.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        if kv.dtype not in (*FLOATS, F8):
            return f"a pool of {kv.dtype}"
        if any(s.const is None for s in kv.shape[2:]):
            return "heads, page and head size must be constant"
        g, d = int(kv.shape[2]), int(kv.shape[4])
        if node.attrs["heads"] % g:
            return f"{node.attrs['heads']} query heads are not a multiple of {g} key heads"
        return f"head size {d} is above {MAX_HEAD}" if d > MAX_HEAD else None

    def early(self, node: Node) -> tuple[int, ...]:
        """Return the tables, so that key addresses are known before the previous kernel has written the product."""
        return 2, 3, 4

    def code(self, u: Unit) -> Code:
        n, p, splits = u.node, Problem.of(u.node), u.node.attrs.get("splits", 0)
        cos = n.operand("cos")
        head = Head(p.d, int(cos.type.shape[1]) if cos else 0, n.attrs["interleaved"]).constants()
        return u.launch(
            Template("rope_attention", "rope_attention"),
            (n.operands[0].type.shape[0], p.g, max(1, splits)),
            **u.pointers(OPERANDS, "out_ptr lse_ptr kv_ptr" if splits else "out_ptr kv_ptr"),
            **({} if splits else {"lse_ptr": None}),
            table_width=u.sizes(n.operands[2].type.shape[1]),
            **p.constants(),
            PAIRS=head["PAIRS"],
            INTERLEAVED=head["INTERLEAVED"],
            EPS=n.attrs["eps"],
            ROUND_DTYPE=ELEMENTS[n.attrs["dtype"]][0],
            SPLITS=splits,
            QUERY_ROWS=self.rows(p),
            KEYS_PER_TILE=u.schedule["keys"],
            TABLES_SETTLED=u.settled,
            INTERPRET=u.interpret,
        )


ROPE_ATTENTION = RopeAttention("triton/rope_attention", ("rope_attention", "rope_attention_split"))
