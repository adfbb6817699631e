"""Runs steps of an artifact on a device: applies their diffs, picks the program, hands back ids; it decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmc_runtime.artifact import Artifact, Tensor
from llmc_runtime.device.device import Device, Memory, Run
from llmc_runtime.exec.capacity import KvCapacity, plan_kv
from llmc_runtime.exec.random_weights import RandomWeights
from llmc_runtime.exec.rows import Rows
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.fields import REMEDY
from llmc_runtime.format.program import Buffer, Program
from llmc_runtime.sched.step import Step, StepOutput, TokenLogprobs

INPUTS = ("rows", "qlens", "emit")
_LOGPROBS = (("logprob", np.float32), ("rank", np.int32), ("top_ids", np.int32), ("top_logprobs", np.float32))
_ALIGN = 4096


@dataclass(frozen=True)
class _Bound:
    """A program with its buffers in place.

    `symbols` are its values in order, those of a step at the indices of `slots`; `width`: likeliest ids.
    """

    program: Program
    symbols: np.ndarray
    slots: tuple[tuple[str, int], ...]
    run: Run
    width: int


class Executor:
    """Owns the states, the arena and the programs of one artifact on one device.

    `kv_bytes` is the KV cache's budget (None: half of the free memory, at most what the rows can use); `capacity` says
    what came of it. Raises LlmcError E112, E113, E202, E203 when it cannot be built.
    """

    def __init__(self, artifact: Artifact, device: Device, kv_bytes: int | None = None) -> None:
        self.artifact = artifact
        self.device = device
        manifest = artifact.manifest
        if manifest.weights.mode == "none":
            raise LlmcError("E111", f"{artifact.root} has no weights yet", "llmc pack ARTIFACT CHECKPOINT")
        device.load(artifact)
        self.capacity: KvCapacity = plan_kv(manifest, kv_bytes, device.free_memory())
        self._env = {"P": self.capacity.pages}
        self._states = {s.name: device.alloc(s.nbytes(self._env)) for s in manifest.states}
        self._weights = self._place_weights()
        self._arena = device.alloc(max((p.arena_bytes for p in artifact.programs), default=0))
        self._io = self._alloc_io()
        self._programs = tuple(self._bind(p) for p in artifact.programs)
        by_role = {s.role: (s, self._states[s.name]) for s in manifest.states if s.role != "kv"}
        self.rows = Rows(device, by_role, self._env, manifest.vocab_size)
        self._inputs = tuple(self._view(name, np.int32) for name in INPUTS)
        self._ids = self._view("ids", np.int32)
        self._outputs = {name: self._view(name, dtype) for name, dtype in _LOGPROBS}

    def run(self, step: Step) -> StepOutput:
        """Apply the diffs and compute; one id (or None) a work, log-probabilities for rows that want them.

        Raises LlmcError E614 where no program serves the step's sizes, E114 where the device fails.
        """
        for init in step.inits:
            self.rows.init(init)
        for pages in step.pages:
            self.rows.grow(pages)
        work = step.work
        count = len(work)
        if not count:
            return StepOutput([], [])
        lengths = [w.num_tokens for w in work]
        self._feed(count, ([w.row for w in work], lengths, [w.emit for w in work]))
        bound = self._pick(sum(lengths), count)
        bound.run()
        ids = self._fetch("ids", self._ids, count).tolist()
        tokens = [i if w.emit else None for i, w in zip(ids, work)]
        wants = self.rows.wants_logprobs
        if not any(wants[w.row] and w.emit for w in work):
            return StepOutput(tokens, [None] * count)
        return StepOutput(tokens, self._logprobs([w.emit and wants[w.row] for w in work], bound.width))

    def close(self) -> None:
        """Give the device's memory and threads back."""
        self._programs = ()
        self.device.close()

    def _feed(self, count: int, values: tuple[list[int], list[int], list[bool]]) -> None:
        for name, view, column in zip(INPUTS, self._inputs, values):
            view[:count] = column
            self.device.push(self._io[name], 0, count * 4)

    def _fetch(self, name: str, view: np.ndarray, count: int) -> np.ndarray:
        self.device.pull(self._io[name], 0, count * 4)
        return view[:count]

    def _pick(self, tokens: int, rows: int) -> _Bound:
        env = {"T": tokens, "R": rows}
        for bound in self._programs:
            if bound.program.fits(env):
                for name, index in bound.slots:
                    bound.symbols[index] = env[name]
                return bound
        served = "; ".join(f"{b.program.name}: {dict(b.program.serves)}" for b in self._programs)
        cause = f"no program serves a step of {tokens} tokens in {rows} rows ({served})"
        raise LlmcError("E614", cause, "recompile with larger --max-num-batched-tokens or --max-num-seqs")

    def _logprobs(self, wanted: list[bool], width: int) -> list[TokenLogprobs | None]:
        """`width`: the likeliest ids that the program tells of a token."""
        n = len(wanted)
        sizes = (n, n, n * width, n * width)
        found = [self._fetch(k, v, size) for (k, v), size in zip(self._outputs.items(), sizes)]
        logprob, rank = found[0].tolist(), found[1].tolist()
        ids, tops = found[2].reshape(n, width).tolist(), found[3].reshape(n, width).tolist()
        each = zip(wanted, logprob, rank, ids, tops)
        return [TokenLogprobs(lp, k, i, t) if want else None for want, lp, k, i, t in each]

    def _view(self, name: str, dtype: type) -> np.ndarray:
        memory = self._io.get(name)
        if memory is None:
            raise LlmcError("E113", f"the artifact's programs have no buffer {name!r}", REMEDY)
        return memory.host.view(dtype)

    def _place_weights(self) -> Mapping[str, int]:
        """The address of every weight that a program names."""
        tensors = dict(self.artifact.tensors)
        if self.artifact.manifest.weights.mode == "random":
            tensors = self._random()
        names = {b.name for p in self.artifact.programs for b in p.buffers if b.kind == "weight" and b.alias is None}
        return {n: self.device.place(tensors[n]) for n in sorted(names)}

    def _random(self) -> dict[str, Tensor]:
        source = RandomWeights(self.artifact.manifest.weights.seed)
        buffers = {b.name: b for p in self.artifact.programs for b in p.buffers if b.kind == "weight"}
        out = {}
        for name, b in buffers.items():
            shape = tuple(d({}) for d in b.shape)
            data = self.device.alloc(b.bytes({})).host
            source.fill(name, b.dtype, len(shape), data)
            out[name] = Tensor(name, b.dtype, shape, data)
        return out

    def _alloc_io(self) -> Mapping[str, Memory]:
        """Inputs and outputs, one memory a name for all programs, sized by the largest."""
        sizes: dict[str, int] = {}
        for p in self.artifact.programs:
            top = p.top() | self._env
            for b in p.buffers:
                if b.kind in ("input", "output") and b.alias is None:
                    sizes[b.name] = max(sizes.get(b.name, 0), b.bytes(top))
        return {name: self.device.alloc(-(-size // _ALIGN) * _ALIGN) for name, size in sizes.items()}

    def _bind(self, program: Program) -> _Bound:
        names = list(program.symbols)
        unbound = set(names) - {"T", "R", *self._env}
        if unbound:
            raise LlmcError("E113", f"program {program.name} has the unknown symbol {min(unbound)}", REMEDY)
        low, high = program.symbols.get("P", (0, 1 << 62))
        if not low <= self.capacity.pages <= high:
            cause = f"program {program.name} takes {low} to {high} KV pages, not {self.capacity.pages}"
            raise LlmcError("E202", cause, "give the KV cache another size")
        symbols = np.array([self._env.get(n, 1) for n in names], np.int64)
        by_name = {b.name: b for b in program.buffers}
        addresses = [self._address(b, by_name) for b in program.buffers]
        run = self.device.bind(program, addresses, symbols)
        width = by_name["top_ids"].shape[-1](self._env) if "top_ids" in by_name else 0
        slots = tuple((n, i) for i, n in enumerate(names) if n not in self._env)
        return _Bound(program, symbols, slots, run, width)

    def _address(self, b: Buffer, by_name: Mapping[str, Buffer]) -> int:
        for _ in by_name:
            if b.alias is None:
                break
            b = by_name[b.alias]
        if b.kind == "weight":
            return self._weights[b.name]
        if b.kind == "state":
            return self._states[b.name].address + b.offset
        if b.kind == "arena":
            return self._arena.address + b.offset
        return self._io[b.name].address + b.offset
