"""An open artifact: its manifest, programs and mapped weights, all checked; it executes nothing of what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.manifest import MINOR, Manifest
from llmc_runtime.format.program import Program
from llmc_runtime.format.safetensors import header_length, parse_header
from llmc_runtime.host_info import Host, check_target, default_threads, this_host

TOKENIZER = "tokenizer"
GPUS = ("cuda", "hip")  # families of targets that are not the CPU of this machine


@dataclass(frozen=True)
class Tensor:
    """A weight as it lies in the mapped `file` from byte `begin` (a multiple of 64) on: u8[nbytes], read-only."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    file: str = ""
    begin: int = 0


@dataclass(frozen=True)
class Artifact:
    """What `open_artifact` found. `digest` identifies the artifact: it changes with any byte of it.

    `unchecked`: the weights' hashes are wanted and have not been compared yet; the device does so while it copies them.
    """

    folder: Folder
    manifest: Manifest
    programs: tuple[Program, ...]
    tensors: Mapping[str, Tensor]
    unchecked: bool = False

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def tokenizer_dir(self) -> Path:
        """The folder with the tokenizer's, chat template's and generation config's files, verbatim."""
        return self.root / TOKENIZER

    def read(self, name: str) -> bytes:
        """A small file that the manifest lists, or LlmcError E106, E107."""
        info = self.manifest.files.get(name)
        if info is None:
            raise LlmcError("E106", f"{self.root} has no file {name!r}", REMEDY)
        for error in self.folder.check_small({name: info}):
            raise error
        return self.folder.read(name, info.bytes)


def open_artifact(
    path: str | Path, *, verify: bool = True, threads: int | None = None, host: Host | None = None
) -> Artifact:
    """Open and check an artifact: names and sizes, version, this machine, hashes, then contents.

    `verify=False` leaves out the hashes of the weights, not those of the small files; `threads` hash (default: the
    physical cores); `host` is the machine to check against (default: this one). An artifact for a GPU is held against
    it, and its weights against their hashes, by the device. Raises LlmcError E101 to E113.
    """
    folder = Folder(path)
    manifest = folder.manifest()
    for error in folder.sizes(manifest):
        raise error
    gpu = manifest.target.name.partition(":")[0] in GPUS
    if not gpu:
        check_target(manifest.target, host or this_host())
    for error in folder.check_small(manifest.files):
        raise error
    lenient = manifest.format[1] > MINOR
    programs = tuple(Program.load(folder.read(p, manifest.files[p].bytes), p, lenient) for p in manifest.programs)
    threads = threads or default_threads()
    try:
        tensors = _map_weights(folder, manifest, verify and not gpu, threads)
        artifact = Artifact(folder, manifest, programs, MappingProxyType(tensors), verify and gpu)
        check_consistent(artifact)
    except LlmcError:
        if verify and gpu:  # a weight that is not there may be one whose name is damaged
            _map_weights(folder, manifest, True, threads)
        raise
    return artifact


def _map_weights(folder: Folder, manifest: Manifest, verify: bool, threads: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in manifest.weights.files:
        where = str(folder.root / file.file)
        data = folder.map(file.file)
        if verify:
            for error in folder.check_weights(file, data, threads):
                raise error
        n = header_length(bytes(data[:8]), len(data), where)
        everything = np.frombuffer(data, np.uint8)
        for t in parse_header(bytes(data[8 : 8 + n]), len(data), where).values():
            if t.name in found:
                raise LlmcError("E113", f"{where}: tensor {t.name[:80]!r} is in two files", REMEDY)
            found[t.name] = Tensor(t.name, t.dtype, t.shape, everything[t.begin : t.end], file.file, t.begin)
    return found


def check_consistent(artifact: Artifact) -> None:
    """LlmcError E113 where a program needs a weight, state or kernel that the artifact lacks, or of another size."""
    kernels = {k.hash for k in artifact.manifest.kernels}
    states = {s.name for s in artifact.manifest.states}
    packed = artifact.manifest.weights.mode == "packed"
    for program in artifact.programs:
        used = {x.kernel for x in program.launches} | ({program.step[0]} if program.step else set())
        for key in used - kernels:
            raise LlmcError("E113", f"program {program.name} needs kernel {key[:16]}, which is not listed", REMEDY)
        for b in program.buffers:
            if b.kind == "state" and b.alias is None and b.name not in states:
                raise LlmcError("E113", f"program {program.name} needs state {b.name!r}, which is not listed", REMEDY)
            if b.kind == "weight" and b.alias is None and packed:
                _check_tensor(artifact, program, b.name, b.bytes({}))


def _check_tensor(artifact: Artifact, program: Program, name: str, nbytes: int) -> None:
    tensor = artifact.tensors.get(name)
    if tensor is None:
        raise LlmcError("E113", f"program {program.name} needs weight {name!r}, which no file holds", REMEDY)
    if tensor.data.nbytes != nbytes:
        sizes = f"{tensor.data.nbytes} bytes, program {program.name} expects {nbytes}"
        raise LlmcError("E113", f"weight {name!r} has {sizes}", REMEDY)
