"""No kernel ignores an optional attribute of its op: it rejects nodes with another value, or its source uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kernels.real_sizes import REAL

from llmc.codegen.kernel import Kernel, Source
from llmc.extend import OPS
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.opdef import REQUIRED
from llmc.ir.ops.attention import SHARED_ATTRIBUTES
from llmc.targets.target import Target

TARGETS = ("cpu:x86-64-v4", "cuda:sm_90", "hip:gfx942")
# Attributes that change the shape of a result or describe operands, which a node with another value would also have,
# and `act_block`, which has no effect without `act`.
NOT_ALONE = frozenset({"keepdim", "bits", "zeros", "act_block"})


def another(value: Any) -> Any:
    """Another value of an attribute; None if it is neither a number nor a bool."""
    if isinstance(value, bool):
        return not value
    return value + (0.5 if isinstance(value, float) else 2) if isinstance(value, int | float) else None


def optional(n: Node) -> Iterator[tuple[str, Any]]:
    """The optional attributes of a node, each with a value that the node does not have."""
    for name, declared in n.op.attrs.items():
        value = another(n.attrs.get(name, declared.default)) if declared.default is not REQUIRED else None
        if value is not None and name not in NOT_ALONE:
            yield name, value


def emitted(kernel: Kernel, n: Node, target: Target) -> Source | None:
    """The source of a node under the kernel's first schedule, without the line that names its attributes."""
    if not kernel.claims(n) or kernel.reject(n, target) is not None:
        return None
    source = kernel.emit(n, kernel.schedules(n, target)[0], target)
    head, _, text = source.text.partition("\n")
    assert head.startswith(("#", "//"))
    return Source(**{**vars(source), "text": text})


def depends(source: Source, other: Source) -> bool:
    """Whether the sources differ in more than the value of a constant that a template is given and does not use."""
    constants, changed = (dict(re.findall(r"\b([A-Z]\w*)=([^,()]+)", s.text)) for s in (source, other))
    names = [name for name, value in constants.items() if changed.get(name, value) != value]
    # A name that is used occurs in a parameter list or record, in the call, and where it is used.
    unused = bool(names) and all(len(re.findall(rf"\b{name}\b", source.text)) < 3 for name in names)
    return source != other and not unused


def test_no_kernel_ignores_an_attribute() -> None:
    registry = load()
    ignored, compared = [], set()
    for target in map(registry.target, TARGETS):
        kernels = [k for k in map(registry.kernels.__getitem__, registry.kernels) if k.language in target.languages]
        for n in (next(iter(text.graph().nodes)) for texts in REAL.values() for text in texts):
            for kernel in kernels if any(optional(n)) else ():
                if (source := emitted(kernel, n, target)) is None:
                    continue
                for name, value in optional(n):
                    before = dict(n.attrs)
                    n.attrs[name] = value
                    compared.add((kernel.name, name))
                    other = emitted(kernel, n, target)
                    if other is not None and not depends(source, other):
                        ignored.append(f"{kernel.name} ignores {name}={value} of {n.op.name}")
                    n.attrs.clear()
                    n.attrs.update(before)
    assert not ignored, "\n".join(dict.fromkeys(ignored))
    assert {("triton/decode_attention", "softcap"), ("cuda/decode_attention", "window")} <= compared
    assert len(compared) > 30


def test_passes_keep_every_attribute_of_paged_attention() -> None:
    shared = set(SHARED_ATTRIBUTES)
    assert set(OPS["paged_attention"].attrs) - {"least"} == shared, "add it to SHARED_ATTRIBUTES: passes would drop it"
    for name in ("attention", "paged_attention_split", "paged_attention_parts", "paged_attention_single"):
        assert shared <= set(OPS[name].attrs), name
