"""Opens an artifact: reads and validates its manifest and programs, and maps its weights. Executes nothing from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.manifest import MINOR, Manifest, WeightFile
from llmc_runtime.format.names import TOKENIZER_FILE
from llmc_runtime.format.program import Program
from llmc_runtime.format.safetensors import header_length, parse_header
from llmc_runtime.host_info import Host, check_target, default_threads, this_host

if TYPE_CHECKING:
    import numpy as np

TOKENIZER = "tokenizer"  # a folder of the artifact
GPUS = ("cuda", "hip")  # target families whose artifacts the device checks


@dataclass(frozen=True)
class Tensor:
    """A weight: `data` is u8[nbytes], a read-only view of the mapped `file` at byte `begin` (a multiple of 64)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    file: str = ""
    begin: int = 0


@dataclass(frozen=True)
class Artifact:
    """An open artifact. `digest` identifies it: it changes with any byte of the artifact.

    If `unchecked` is set, the weights' hashes have not been verified yet; the device does so while it copies them.
    `tensors` are those of one `rank`. If the artifact of a draft model is joined to it (see exec.draft_artifact),
    `programs`, and the states and the digest of `manifest`, are those of both; files are read from its `parts`.
    """

    folder: Folder
    manifest: Manifest
    programs: tuple[Program, ...]
    tensors: Mapping[str, Tensor]
    unchecked: bool = False
    rank: int = 0
    joined: tuple[Artifact, ...] = ()

    @property
    def parts(self) -> tuple[Artifact, ...]:
        """The artifacts with its kernels and weights: itself, or those of the model and of the draft model."""
        return self.joined or (self,)

    @property
    def root(self) -> Path:
        """The artifact's folder."""
        return self.folder.root

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest, in hex."""
        return self.manifest.digest

    @property
    def tokenizer_dir(self) -> Path:
        """The folder with unchanged copies of the tokenizer, chat template and generation config files."""
        return self.root / TOKENIZER

    def read(self, name: str) -> bytes:
        """Return a small file that the manifest lists; raise LlmcError E106 or E107 if it is missing or damaged."""
        info = self.manifest.files.get(name)
        if info is None:
            raise LlmcError("E106", f"{self.root} has no file {name!r}", REMEDY)
        for error in self.folder.check_small({name: info}):
            raise error
        return self.folder.read(name, info.bytes)


def require_digest(artifact: Artifact, digest: str, other: str) -> None:
    """Raise LlmcError E118 unless the artifact has this digest: that of `other`."""
    if artifact.digest != digest:
        cause = f"{artifact.root} is not the artifact that {other}"
        raise LlmcError("E118", cause, "restart, or restore the previous artifact")


def has_tokenizer(manifest: Manifest) -> bool:
    """Whether the artifact has a tokenizer."""
    return f"{TOKENIZER}/{TOKENIZER_FILE}" in manifest.tokenizer


def open_artifact(
    path: str | Path,
    *,
    verify: bool = True,
    threads: int | None = None,
    host: Host | None = None,
    rank: int = 0,
    on_manifest: Callable[[Manifest], None] = lambda manifest: None,
) -> Artifact:
    """Open and check an artifact: names and sizes, version, this machine, hashes, then contents.

    verify:   whether to hash the weights; small files are always hashed
    threads:  number of hashing threads (default: the physical cores)
    host:     the machine to check the target against (default: this one)
    rank:     the rank whose weights are mapped
    on_manifest:  called with the manifest before the programs are read

    For a GPU target, the device checks the architecture and the hashes of the weights. Raises LlmcError E101 to E113.
    """
    folder = Folder(path)
    manifest = folder.manifest()
    for error in folder.sizes(manifest):
        raise error
    on_manifest(manifest)
    gpu = manifest.target.name.partition(":")[0] in GPUS
    if not gpu:
        check_target(manifest.target, host or this_host())
    for error in folder.check_small(manifest.files):
        raise error
    lenient = manifest.format[1] > MINOR
    try:
        programs = tuple(Program.load(folder.read(p, manifest.files[p].bytes), p, lenient) for p in manifest.programs)
    finally:
        Program.forget_interned()
    threads = threads or default_threads()
    try:
        weights = manifest.weights.of_rank(rank)
        tensors = _map_weights(folder, weights, threads, verify=verify and not gpu)
        artifact = Artifact(folder, manifest, programs, MappingProxyType(tensors), verify and gpu, rank)
        check_consistent(artifact)
    except LlmcError:
        if verify and gpu:  # a damaged weight file may be why a weight is missing
            _map_weights(folder, manifest.weights.of_rank(rank), threads, verify=True)
        raise
    return artifact


def _map_weights(folder: Folder, files: Sequence[WeightFile], threads: int, *, verify: bool) -> dict[str, Tensor]:
    """Return the tensors of weight files by name, as views of the mapped files; with `verify`, check the hashes first.

    Raises LlmcError E106 or E107 for damaged files, and E113 for a tensor in two files.
    """
    import numpy as np  # takes a twentieth of a second, in which a GPU is initialized

    tensors: dict[str, Tensor] = {}
    for file in files:
        where = str(folder.root / file.file)
        data = folder.map(file.file)
        if verify:
            for error in folder.check_weights(file, data, threads):
                raise error
        n = header_length(bytes(data[:8]), len(data), where)
        contents = np.frombuffer(data, np.uint8)
        for t in parse_header(bytes(data[8 : 8 + n]), len(data), where).values():
            if t.name in tensors:
                raise LlmcError("E113", f"{where}: tensor {t.name[:80]!r} is in two files", REMEDY)
            tensors[t.name] = Tensor(t.name, t.dtype, t.shape, contents[t.begin : t.end], file.file, t.begin)
    return tensors


def check_consistent(artifact: Artifact) -> None:
    """Raise LlmcError E113 if a program needs a weight, state or kernel that is missing or has another size."""
    kernels = {k.hash for k in artifact.manifest.kernels}
    states = {s.name for s in artifact.manifest.states}
    packed = artifact.manifest.weights.mode == "packed"
    for program in artifact.programs:
        if program.ranks != artifact.manifest.ranks:
            sizes = f"{program.ranks} ranks, the artifact {artifact.manifest.ranks}"
            raise LlmcError("E113", f"program {program.name} is for {sizes}", REMEDY)
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
        raise LlmcError("E113", f"program {program.name} needs weight {name!r}, which no file contains", REMEDY)
    if tensor.data.nbytes != nbytes:
        sizes = f"{tensor.data.nbytes} bytes, program {program.name} expects {nbytes}"
        raise LlmcError("E113", f"weight {name!r} has {sizes}", REMEDY)
