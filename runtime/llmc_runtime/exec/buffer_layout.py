"""Allocates and places the buffers of an artifact's programs: states, weights, arena, inputs and outputs.

Weights of artifacts that were compiled with `--weights random:SEED` are finite, of usual magnitude, and equal on all
machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device, Memory
from llmc_runtime.exec.capacity import NOTHING, KvCapacity, Need, plan_kv
from llmc_runtime.format.dtypes import DTYPE_BITS
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.program import FILL, FIRST, GROUP, NEXT, Buffer, Program, memory_of, weights_of

INPUTS = ("rows", "qlens", "emit")
ROLES = ("", FILL, FIRST, NEXT)  # each has inputs of its own, whose names begin with the role
_ALIGN = 256  # bytes to which inputs and outputs are rounded up
_PAGE = 4096  # bytes to which states and weights are rounded up
_GRAIN_BYTES = 2 << 20  # allocation granularity of devices with their own memory
_PERIOD = (1 << 20) - 3  # a prime, so that no two rows of a matrix are equal and every token can be the most likely one
STD = 0.02
# Exponent biases: OCP 8-bit Floating Point Specification 1.0; AMD CDNA 3 (fnuz: 128 is NaN, and zero has no sign).
_BIASES: Mapping[str, int] = MappingProxyType({"f8e4m3": 7, "f8e4m3fnuz": 8})


def need_of(artifact: Artifact) -> Need:
    """Return the memory needed besides the KV pages, rounded up as a device with its own memory allocates it."""
    weights = sum(_weight_bytes(part) for part in artifact.parts)
    states = sum(_round_up(s.nbytes({}), _GRAIN_BYTES) for s in artifact.manifest.states if s.role != "kv")
    io_bytes = sum(_round_up(size, _ALIGN) for size in _io_sizes(artifact, {}).values())
    other = (_arena_bytes(artifact), io_bytes, _group_bytes(artifact))
    return Need(weights, states, sum(_round_up(size, _GRAIN_BYTES) for size in other))


def _weight_bytes(part: Artifact) -> int:
    """Return the memory of an artifact's weights on a device with its own memory."""
    weights = part.manifest.weights
    if weights.mode == "random":
        sizes = (_round_up(buffer.bytes({}), _PAGE) for buffer in weights_of(part.programs).values())
        return _round_up(sum(sizes), _GRAIN_BYTES)
    return sum(_round_up(file.bytes, _GRAIN_BYTES) for file in weights.of_rank(part.rank))


def kv_capacity(artifact: Artifact, device: Device, kv_bytes: int | None, snapshots: int | None = 0) -> KvCapacity:
    """Return the size of the KV cache of an artifact on a device (see plan_kv). Raises LlmcError E202 or E205."""
    need = need_of(artifact) if device.separate else NOTHING
    return plan_kv(artifact.manifest, kv_bytes, device.free_memory(), device.share, need, snapshots)


class Layout:
    """The memory of one artifact on one device, allocated on construction. Raises LlmcError E107, E112 or E203.

    `inputs` holds, for each role of programs, the arrays rows, qlens and emit, i32, at a distance of `strides` bytes,
    so that one write updates all of them. `outputs` maps names to memory. `snapshots` has `snapshot_bytes` bytes.
    """

    def __init__(self, artifact: Artifact, device: Device, env: Mapping[str, int], snapshot_bytes: int = 0) -> None:
        self._artifact, self._device = artifact, device
        self._random: list[Mapping[str, Memory]] = []  # keeps random weights alive: a CPU's arrays own the memory
        with ThreadPoolExecutor(2) as pool:  # load kernels and allocate states while weights are read
            loading, placing = pool.submit(self._load), pool.submit(self._place_weights)
            self.states = {s.name: device.alloc(s.nbytes(env)) for s in artifact.manifest.states}
            self.snapshots = device.alloc(snapshot_bytes) if snapshot_bytes else None
            self._arena = device.alloc(_arena_bytes(artifact))
            group_bytes = _group_bytes(artifact)
            self._group = device.group_memory(group_bytes) if group_bytes else None
        loading.result()
        self._weights = placing.result()
        sizes = _io_sizes(artifact, env)
        self.inputs: dict[str, Memory] = {}
        self.strides: dict[str, int] = {}
        self._io: dict[str, Memory] = {}
        for role in ROLES:
            names = [f"{role}.{name}" if role else name for name in INPUTS]
            stride = self.strides[role] = _round_up(max(sizes.get(name, 0) for name in names), _ALIGN)
            memory = self.inputs[role] = device.alloc(stride * len(INPUTS))
            self._io |= {name: memory.part(i * stride, (i + 1) * stride) for i, name in enumerate(names)}
        self.outputs = _parts(device, {n: s for n, s in sizes.items() if n not in self._io}, _ALIGN)
        self._io |= self.outputs

    def addresses(self, program: Program) -> list[int]:
        """Return the address of each of the program's buffers, in order."""
        by_name = {b.name: b for b in program.buffers}
        return [self._address(b, by_name) for b in program.buffers]

    def output(self, name: str) -> Memory:
        """Return an output's memory; raise LlmcError E113 if the programs have no output of that name."""
        if name not in self.outputs:
            raise LlmcError("E113", f"the artifact's programs have no buffer {name!r}", REMEDY)
        return self.outputs[name]

    def arena_part(self, b: Buffer, nbytes: int) -> Memory:
        """Return the first `nbytes` bytes of a buffer in the arena."""
        return self._arena.part(b.offset, b.offset + nbytes)

    def _address(self, buffer: Buffer, by_name: Mapping[str, Buffer]) -> int:
        """Return a buffer's address: that of the buffer whose memory it uses, plus an offset."""
        owner = memory_of(buffer, by_name)
        if owner.kind == "weight":
            return self._weights[owner.name]
        if owner.kind == "state":
            return self.states[owner.name].address + owner.offset
        if owner.kind == "arena":
            return self._arena.address + owner.offset
        if owner.kind == GROUP and self._group is not None:
            return self._group.address
        return self._io[owner.name].address + owner.offset

    def _load(self) -> None:
        for part in self._artifact.parts:
            self._device.load(part)

    def _place_weights(self) -> Mapping[str, int]:
        return {name: address for part in self._artifact.parts for name, address in self._place(part).items()}

    def _place(self, part: Artifact) -> Mapping[str, int]:
        buffers, weights = weights_of(part.programs), part.manifest.weights
        if weights.mode != "random":
            return self._device.place(part, sorted(buffers))
        source = RandomWeights(weights.seed, frozenset(weights.negative))
        memories = _parts(self._device, {n: b.bytes({}) for n, b in buffers.items()}, _PAGE)
        self._random.append(memories)
        for name, memory in memories.items():
            b = buffers[name]
            self._device.repeat(memory, *source.tile(name, b.dtype, len(b.shape), memory.nbytes))
        return {name: memory.address for name, memory in memories.items()}


def _parts(device: Device, sizes: Mapping[str, int], align: int) -> dict[str, Memory]:
    """Cut one allocation into memories of these sizes, each starting at a multiple of `align`."""
    memory = device.alloc(sum(_round_up(n, align) for n in sizes.values()))
    out, at = {}, 0
    for name, size in sizes.items():
        out[name] = memory.part(at, at + size)
        at += _round_up(size, align)
    return out


def _io_sizes(artifact: Artifact, env: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every input and output in bytes, the largest over all programs."""
    sizes: dict[str, int] = {}
    for p in artifact.programs:
        top = {**p.top(), **env}
        for b in p.buffers:
            if b.kind in ("input", "output") and b.alias is None:
                sizes[b.name] = max(sizes.get(b.name, 0), b.bytes(top))
    return sizes


def _arena_bytes(artifact: Artifact) -> int:
    return max((p.arena_bytes for p in artifact.programs), default=0)


def _group_bytes(artifact: Artifact) -> int:
    """Return the size of the memory through which ranks exchange results; 0 if no program uses it."""
    return max((b.bytes(p.top()) for p in artifact.programs for b in p.buffers if b.kind == GROUP), default=0)


def _round_up(size: int, align: int) -> int:
    return -(-size // align) * align


class RandomWeights:
    """Generates tensors from a seed: vectors (norms) are ones, matrices follow N(0, 0.02).

    Tensors that `negative` names are -1. Integers of type i8 are codes of such matrices whose scale is 1/1600; other
    integers are random bits.
    """

    def __init__(self, seed: int, negative: Collection[str] = ()) -> None:
        self.seed = seed
        self.negative = negative
        rng = np.random.Generator(np.random.PCG64(seed))
        self._normal = (rng.standard_normal(_PERIOD, dtype=np.float32) * np.float32(STD)).clip(-3 * STD, 3 * STD)
        self._bits = rng.integers(0, 256, _PERIOD, dtype=np.uint8)
        self._tiles: dict[str, np.ndarray] = {}

    def tile(self, name: str, dtype: str, rank: int, nbytes: int) -> tuple[np.ndarray, int]:
        """Return a sequence u8[n] and an offset into it; the tensor's bytes repeat the sequence from that offset on.

        The offset depends on the name. Tensors of one dtype with more than one axis share the sequence, as the same
        array.
        """
        if rank < 2 or name in self.negative:
            one = _encode(np.full(1, -1 if name in self.negative else 1, np.float32), dtype)
            return (np.zeros(max(1, nbytes), np.uint8) if one is None else np.tile(one, nbytes // len(one))), 0
        if dtype not in self._tiles:
            encoded = _encode(self._normal, dtype)
            self._tiles[dtype] = self._bits if encoded is None else encoded
        tile = self._tiles[dtype]
        width = max(1, DTYPE_BITS[dtype] // 8)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return tile, int.from_bytes(digest[:4], "little") % (len(tile) // width) * width


def _encode(values: np.ndarray, dtype: str) -> np.ndarray | None:
    """Encode f32 values as bytes of a float dtype or of codes i8; None for other dtypes."""
    if dtype in _BIASES:
        return _encode_f8(values, _BIASES[dtype])
    if dtype == "i8":
        return np.rint(values * 1600).astype(np.int8).view(np.uint8)
    if dtype == "bf16":
        bits = values.view(np.uint32)
        # Round to nearest, ties to even.
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    numpy_dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(dtype)
    return None if numpy_dtype is None else np.ascontiguousarray(values.astype(numpy_dtype)).view(np.uint8)


def _encode_f8(values: np.ndarray, bias: int) -> np.ndarray:
    """Encode f32 values below 240 as floats of 8 bits with 3 bits of mantissa, rounded to nearest."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    size = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - bias - 3), fraction * 2.0 ** (-bias - 2))
    size = size.astype(np.float32)
    nearest = np.searchsorted((size[1:] + size[:-1]) / 2, np.abs(values))
    signed = np.signbit(values) & ((nearest > 0) | (bias == _BIASES["f8e4m3"]))
    return (nearest | signed * 128).astype(np.uint8)
