"""Programs as data: the symbols, buffers and launches of one entry point; parsing and validation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc_runtime.format.dtypes import DTYPE_BITS
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.json_fields import Fields, a_range, a_text, damaged, load_json
from llmc_runtime.format.launch_param import ZERO, Param, TensorMap, a_size
from llmc_runtime.format.names import DRAFT_MODEL, EAGLE, MAX_RANKS, MTP
from llmc_runtime.format.record import Record, nullable, stored
from llmc_runtime.format.row_abi import MAX_DRAFTS

# Names of the programs of a draft model begin with their role: computing the KV of tokens, drafting a token from the
# last two tokens of a row, and drafting a token from the draft before it. A head (EAGLE-3) has no FILL, and its FIRST
# drafts from the last token.
FILL, FIRST, NEXT = "draft_fill", "draft_first", "draft_next"
DRAFT_PREFIX = "draft."  # prefix of the names of a draft model's weights and KV pools
DRAFT_LOGPROB = "draft_logprob"  # output of FIRST and NEXT: log-probabilities of the tokens that they draft
# Prefixes of the names of programs that compute no entries of a head: those that decode, and those of any tokens.
PLAIN, PLAIN_STEP = "decode_plain", "step_plain"
# Prefix of the names of weights with which programs join the hidden states that an EAGLE-3 head reads.
_JOINING = f"{DRAFT_PREFIX}fc.weight"
RANK = "K"  # the symbol of the rank: 0 up to the number of ranks - 1
GROUP = "group"  # the kind of the buffer through which ranks on GPUs exchange results; see group_memory.py
KINDS = ("input", "output", "weight", "state", "arena", GROUP)
MAX_CLUSTER = 8  # maximum blocks of a cluster on every GPU that has clusters
Symbols = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Buffer(Record):
    """A buffer, which launches refer to by index.

    `offset` is in bytes from the start of the arena or of the state. `alias` names the buffer whose memory this one
    uses: the new version of a state aliases the old one.
    """

    json_order = ("name", "kind", "dtype", "shape", "offset", "bytes", "alias")
    interned = True

    name: str = stored(Fields.text)
    kind: str = stored(Fields.text)
    dtype: str = stored(Fields.text)
    shape: tuple[Expr, ...] = stored(Fields.list, item=a_size, cap=16)
    bytes: Expr = stored(Fields.item, item=a_size)
    offset: int = stored(Fields.integer, 0)
    alias: str | None = stored(nullable(Fields.item), None, item=a_text)

    def validate(self, where: str) -> None:
        """See Record."""
        if self.kind not in KINDS:
            raise damaged(where, f"unknown kind {self.kind!r} (known: {', '.join(KINDS)})")
        if self.dtype not in DTYPE_BITS:
            raise damaged(where, f"unknown dtype {self.dtype!r}")


@dataclass(frozen=True)
class Launch(Record):
    """One kernel launch.

    `args` are indices of the program's buffers; those listed in `maps` are passed as tensor maps. `sizes` are passed as
    int64 (as int32 on GPUs). `params`, on GPUs, lists the kernel's parameters; if it is empty, these are every
    argument, every size and two null pointers. `grid` is the number of blocks along x, y and z, `threads` the threads
    per block, and `shared` the bytes of dynamic shared memory. `cluster` is the number of blocks of a cluster along
    each axis of the grid; if it is empty, blocks are launched without clusters. `pdl` enables programmatic dependent
    launch: the kernel may start before the preceding one has ended. `flops` and `bytes` are the estimated cost, for
    reports only.
    """

    json_order = (
        "kernel", "entry", "grid", "threads", "shared", "args", "sizes", "loc", "op", "pdl", "maps", "params",
        "cluster", "flops", "bytes",
    )  # fmt: skip
    interned = True
    own = ("args", "loc")

    kernel: str = stored(Fields.key)
    entry: str = stored(Fields.text)
    args: tuple[int, ...] = stored(Fields.integers, cap=4096)
    sizes: tuple[Expr, ...] = stored(Fields.list, item=a_size, cap=256)
    grid: tuple[Expr, ...] = stored(Fields.list, (), item=a_size, cap=3)
    threads: int = stored(Fields.integer, 0)
    shared: int = stored(Fields.integer, 0)
    loc: str = stored(Fields.text, "")
    op: str = stored(Fields.text, "")
    flops: Expr | None = stored(nullable(Fields.item), None, omitted=True, item=a_size)
    bytes: Expr | None = stored(nullable(Fields.item), None, omitted=True, item=a_size)
    pdl: bool = stored(Fields.bit, False, omitted=True, write=int)
    maps: tuple[TensorMap, ...] = stored(Fields.list, (), omitted=True, item=TensorMap, cap=16)
    params: tuple[Param, ...] = stored(Fields.list, (), omitted=True, item=Param, cap=4096)
    cluster: tuple[int, ...] = stored(Fields.integers, (), omitted=True, cap=3)


def _read_step(reader: Fields, key: str) -> tuple[str, str]:
    function = reader.sub(key)
    step = function.key("kernel"), function.text("entry")
    function.close(("kernel", "entry"))
    return step


def _write_step(step: tuple[str, str]) -> dict[str, str]:
    return {"kernel": step[0], "entry": step[1]}


@dataclass(frozen=True)
class Program(Record):
    """One entry point for a range of sizes.

    `symbols` maps every symbol to its bounds, in the order in which a step function takes their values. `serves`
    narrows the bounds to the steps for which this program is selected. `uniform` means one token per entry (T = R).
    `drafts` is the maximum number of drafted tokens that it verifies per row; with 0 every row has one emitting entry.
    `step` is (kernel hash, entry) of the function that runs the launches in order, on targets that have one. `ranks` is
    the number of processes that run the program together; the value of the symbol RANK tells them apart.
    """

    json_order = (
        "name", "symbols", "serves", "uniform", "buffers", "arena_bytes", "launches", "step", "drafts", "ranks",
    )  # fmt: skip

    name: str = stored(Fields.text)
    symbols: Symbols = stored(Fields.table, item=a_range, cap=16)
    serves: Symbols = stored(Fields.table, item=a_range, cap=16)
    buffers: tuple[Buffer, ...] = stored(Fields.list, item=Buffer)
    launches: tuple[Launch, ...] = stored(Fields.list, item=Launch)
    arena_bytes: int = stored(Fields.integer, high=1 << 44)
    uniform: bool = stored(Fields.bit, False, write=int)
    step: tuple[str, str] | None = stored(nullable(_read_step), None, omitted=True, write=_write_step)
    ranks: int = stored(Fields.integer, 1, low=1, high=MAX_RANKS)
    drafts: int = stored(Fields.integer, 0, omitted=True, high=MAX_DRAFTS)

    @property
    def role(self) -> str:
        """FILL, FIRST or NEXT for a program of a draft model, else ""."""
        return next((role for role in (FILL, FIRST, NEXT) if self.name.startswith(role)), "")

    @property
    def is_plain(self) -> bool:
        """Whether it stores zeros as the keys, values and hidden states of a head, instead of computing them."""
        return self.name.startswith((PLAIN, PLAIN_STEP))

    def top(self) -> dict[str, int]:
        """Return every symbol's upper bound, which determines the sizes of buffers."""
        return {s: high for s, (_, high) in self.symbols.items()}

    def state_symbols(self) -> set[str]:
        """Return the symbols in the sizes of states, whose values are fixed when the states are allocated."""
        return {s for b in self.buffers if b.kind == "state" for d in b.shape for s in d.symbols}

    def smallest_states(self) -> dict[str, int]:
        """Return the symbols' upper bounds, except that states have their smallest sizes."""
        fixed = self.state_symbols()
        return {s: low if s in fixed else high for s, (low, high) in self.symbols.items()}

    def fits(self, env: Mapping[str, int]) -> bool:
        """Return whether this program serves a step of these sizes."""
        return all(lo <= env[s] <= hi for s, (lo, hi) in self.serves.items()) and not (
            self.uniform and env["T"] != env["R"]
        )

    @property
    def kernel_table(self) -> tuple[tuple[str, str], ...]:
        """(kernel hash, entry) of every launch in order: the function table of the step function."""
        return tuple((x.kernel, x.entry) for x in self.launches)

    def dump(self) -> bytes:
        """Serialize to the file's bytes, with one line per buffer and launch: programs can be compared as text."""
        doc = self.json()
        rows = [
            f"  {json.dumps(k)}: {_rows(v) if k in ('buffers', 'launches') else json.dumps(v)}" for k, v in doc.items()
        ]
        return ("{\n" + ",\n".join(rows) + "\n}\n").encode()

    @staticmethod
    def load(data: bytes, where: str, lenient: bool = False) -> Program:
        """Parse a program file; raise LlmcError E103 or E108, naming `where` and the field, if it is invalid."""
        return Program.read(load_json(data, where), where, lenient)

    def validate(self, where: str) -> None:
        """See Record: indices are in range, symbols declared, and arena offsets inside the arena."""
        by_name = {b.name: b for b in self.buffers}
        if len(by_name) != len(self.buffers):
            raise damaged(where, "two buffers have the same name")
        if not set(self.serves) <= frozenset(self.symbols):
            raise damaged(where, "'serves' uses an undeclared symbol")
        check = _Check(self, by_name, frozenset(self.symbols), self.top(), self.smallest_states())
        for i, buffer in enumerate(self.buffers):
            check.buffer(buffer, f"{where}.buffers[{i}]")
        for i, launch in enumerate(self.launches):
            check.launch(launch, f"{where}.launches[{i}]")


def weights_of(programs: Iterable[Program]) -> dict[str, Buffer]:
    """Return every weight that a program uses, by name."""
    return {b.name: b for p in programs for b in p.buffers if b.kind == "weight" and b.alias is None}


def method_of(programs: Sequence[Program]) -> str:
    """Return the method of the draft model, head or layer whose programs are among these; "" if there is none."""
    roles = {program.role for program in programs}
    if FIRST not in roles:
        return ""
    if FILL in roles:
        return DRAFT_MODEL
    return EAGLE if any(name.startswith(_JOINING) for name in weights_of(programs)) else MTP


def _rows(values: list[Any]) -> str:
    if not values:
        return "[]"
    return "[\n" + ",\n".join(f"    {json.dumps(v)}" for v in values) + "\n  ]"


@dataclass(frozen=True)
class _Check:
    """Checks the buffers and launches of a program against each other; raises LlmcError E103, naming `path`."""

    program: Program
    by_name: Mapping[str, Buffer]
    declared: frozenset[str]  # the symbols
    top: Mapping[str, int]  # their upper bounds
    smallest: Mapping[str, int]  # the upper bounds, except that states have their smallest sizes
    mapped: set[tuple[Any, ...]] = field(default_factory=set)  # the tensor maps that were checked, with their memory

    def symbols(self, sizes: Iterable[Expr], path: str) -> None:
        """Check that sizes use declared symbols."""
        for size in sizes:
            if not size.symbols <= self.declared:
                raise damaged(path, f"size {size.text[:80]!r} uses an undeclared symbol")

    def buffer(self, buffer: Buffer, path: str) -> None:
        """Check that sizes use declared symbols, that an alias exists, and that the buffer lies inside the arena."""
        self.symbols((*buffer.shape, buffer.bytes), path)
        if buffer.alias is not None and buffer.alias not in self.by_name:
            raise damaged(path, f"alias of unknown buffer {buffer.alias[:80]!r}")
        in_arena = buffer.kind == "arena" and buffer.alias is None
        if in_arena and buffer.offset + buffer.bytes(self.top) > self.program.arena_bytes:
            raise damaged(path, f"ends past the arena of {self.program.arena_bytes} bytes")

    def launch(self, x: Launch, path: str) -> None:
        """Check a launch's indices and symbols, its cluster, and that tensor maps and parameters lie inside buffers."""
        if x.args and not 0 <= min(x.args) <= max(x.args) < len(self.program.buffers):
            raise damaged(path, "an argument's index is out of range")
        self.symbols((*x.sizes, *x.grid), path)
        _check_cluster(x, self.top, path)
        self.maps(x, path)
        for j, param in enumerate(x.params):
            self.param(param, x, f"{path}.params[{j}]")

    def maps(self, x: Launch, path: str) -> None:
        """Check that every tensor map is of an argument of its own and lies inside its buffer."""
        map_args = [m.arg for m in x.maps]
        for m in x.maps:
            if m.arg >= len(x.args) or (not x.params and map_args.count(m.arg) > 1):
                raise damaged(path, "a tensor map has an argument index that is out of range or used twice")
            mapped = self.program.buffers[x.args[m.arg]]
            owner = memory_of(mapped, self.by_name)
            memory = owner.kind == "state", mapped.dtype, owner.offset, owner.bytes.text
            if (id(m), *memory) not in self.mapped:  # layers have the same maps (see Record.interned)
                self.map(m, mapped, owner, path)
                self.mapped.add((id(m), *memory))

    def map(self, m: TensorMap, mapped: Buffer, owner: Buffer, path: str) -> None:
        """Check that a tensor map of a buffer lies inside the memory of `owner`, at every step."""
        self.symbols((*m.shape, *m.strides, m.offset), path)
        for env in (self.top, self.smallest) if owner.kind == "state" else (self.top,):
            m.check(mapped.dtype, owner.offset, owner.bytes(env), env, path)

    def param(self, param: Param, x: Launch, path: str) -> None:
        """Check that a parameter's argument, map and symbols exist, and that its offset lies inside the buffer."""
        count = {"arg": len(x.args), "tensor": len(x.args), "map": len(x.maps)}.get(param.kind, 1)
        if param.index >= count:
            raise damaged(path, f"the launch has no {param.kind} {param.index}")
        self.symbols((param.offset,) if param.size is None else (param.size, param.offset), path)
        if param.offset != ZERO:
            owner = memory_of(self.program.buffers[x.args[param.index]], self.by_name)
            # A state may be allocated for fewer pages or rows than the symbols' upper bounds.
            lowest = {s: low for s, (low, _) in self.program.symbols.items()} if owner.kind == "state" else self.top
            if not 0 <= param.offset(self.top) < owner.bytes(lowest):
                raise damaged(path, f"the offset {param.offset} is outside of the buffer {owner.name[:80]!r}")


def _check_cluster(x: Launch, top: Mapping[str, int], path: str) -> None:
    """Check that a cluster has three sizes, at most MAX_CLUSTER blocks, and divides the grid of the largest step."""
    if not x.cluster:
        return
    if len(x.cluster) != 3 or min(x.cluster) < 1 or math.prod(x.cluster) > MAX_CLUSTER:
        raise damaged(path, f"a cluster has three sizes of at least 1 and at most {MAX_CLUSTER} blocks")
    if len(x.grid) != 3 or any(g(top) % c for g, c in zip(x.grid, x.cluster)):
        raise damaged(path, f"the grid is not a multiple of the cluster {list(x.cluster)} along every axis")


def memory_of(b: Buffer, by_name: Mapping[str, Buffer]) -> Buffer:
    """Return the buffer that owns the memory of `b`, following aliases."""
    for _ in by_name:  # bounded, in case aliases form a cycle
        if b.alias is None:
            break
        b = by_name[b.alias]
    return b
