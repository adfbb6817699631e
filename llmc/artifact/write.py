"""Writes an artifact folder, which appears at its path complete or not at all.

The artifact has the licences of kernels that contain another project's code, read from its installed package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from llmc_runtime.format.expr import parse as parse_size
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.json_fields import is_safe_name
from llmc_runtime.format.manifest import (
    RECURRENT,
    FileInfo,
    KernelFile,
    Limits,
    Manifest,
    Source,
    State,
    TargetInfo,
    Weights,
    kv_of,
)
from llmc_runtime.format.names import TEMPLATE_DIR
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.program import DRAFT_PREFIX, Program

from llmc.artifact.cost_report import roofline
from llmc.artifact.files import Files, Hook, no_hook
from llmc.artifact.publish import PART, check_free, locked, publish, sweep, temporary
from llmc.artifact.rank_weights import write_rank_weights
from llmc.artifact.weights import Progress
from llmc.codegen.build import Binary
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module
from llmc.ir.weight_eval import WeightSource
from llmc.passes.lower.page_recurrence import STATES
from llmc.targets.target import Target

_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS")


@dataclass(frozen=True)
class PackedWeights:
    """Weights to evaluate. The graph's outputs have the names that programs use; the source's tensors, those of the
    checkpoint.
    """

    graph: Graph
    source: WeightSource


@dataclass(frozen=True)
class Parts:
    """The contents of an artifact.

    weights: PackedWeights, an int (random with this seed) or None (packed later). ir: (pass, text) in order. reports:
    file name below report/ -> JSON data or text. machine: adds roofline.json to the reports. tokenizer: files copied
    verbatim. pooling: None if the model generates. negative: names of the weights that are negative if they are random.
    role: the manifest's.
    """

    compiler: str
    source: Source
    target: TargetInfo
    limits: Limits
    vocab_size: int
    eos_token_ids: Sequence[int]
    page_size: int
    states: Sequence[State]
    kernels: Iterable[Binary]
    programs: Sequence[Program]
    weights: PackedWeights | int | None
    tokenizer: Sequence[Path] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    ir: Sequence[tuple[str, str]] = ()
    reports: Mapping[str, Any] = field(default_factory=dict)
    machine: Target | None = None
    pooling: Pooling | None = None
    role: str = ""
    negative: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks that the programs are for."""
        return max((p.ranks for p in self.programs), default=1)


def write_artifact(
    out: str | Path, parts: Parts, *, force: bool = False, hook: Hook = no_hook, progress: Progress | None = None
) -> Manifest:
    """Write `parts` to the folder `out`, which appears complete or not at all.

    Raises Diagnostic E120 (exists, no `force`), E121 (being written by another process), E122 (not an artifact), E123
    (write error), E124 (weights), and the errors of the weights' source; no files are left in these cases.
    """
    path = Path(os.path.abspath(out))
    with locked(path):
        check_free(path, force)
        sweep(path)
        with temporary(path, hook) as files:
            files.put(PART, b"")
            writer = _Writer(files)
            manifest = writer.write(parts, progress)
            files.put(PART, manifest.dump(), replace=True)
            files.sync()
            publish(files, path)
    return Manifest.load(manifest.dump())


class _Writer:
    """Writes files and records their hashes."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.hashes: dict[str, FileInfo] = {}

    def put(self, name: str, data: bytes) -> str:
        if not is_safe_name(name):
            raise Diagnostic("E104", f"{name!r} is not a permitted file name in an artifact", "rename the file")
        self.files.put(name, data)
        self.hashes[name] = FileInfo(sha256(data), len(data))
        return name

    def write(self, parts: Parts, progress: Progress | None) -> Manifest:
        """Write all files and return the manifest, which the caller writes last."""
        kernels = tuple(self._kernel(k) for k in parts.kernels)
        programs = tuple(self.put(f"programs/{p.name}.json", _checked(p)) for p in parts.programs)
        tokenizer = tuple(self.put(f"tokenizer/{_tokenizer_name(t)}", _bytes_of(t)) for t in parts.tokenizer)
        for i, (name, text) in enumerate(parts.ir):
            self.put(f"ir/{i:02d}-{name}.llir", text.encode())
        for name, report in {**predictions(parts), **parts.reports}.items():
            text = report if isinstance(report, str) else json.dumps(report, indent=1, allow_nan=False) + "\n"
            self.put(f"report/{name}", text.encode())
        weights = self._weights(parts, progress)
        return Manifest(
            compiler=parts.compiler,
            source=parts.source,
            target=parts.target,
            limits=parts.limits,
            kv=kv_of(parts.states, parts.page_size),
            vocab_size=parts.vocab_size,
            eos_token_ids=tuple(parts.eos_token_ids),
            generation=dict(parts.generation),
            deterministic=parts.machine is not None and parts.machine.deterministic,
            pooling=parts.pooling,
            kernels=kernels,
            states=tuple(parts.states),
            programs=programs,
            weights=weights,
            tokenizer=tokenizer,
            files=self.hashes,
            ranks=parts.ranks,
            role=parts.role,
        )

    def _kernel(self, k: Binary) -> KernelFile:
        binary = self.put(f"kernels/{k.hash}.{k.suffix}", k.binary)
        source = self.put(f"kernels/{k.hash}.{k.language}", k.source.encode())
        return KernelFile(k.hash, binary, source, k.entry, k.threads, k.shared, k.abi, self._license(k.license))

    def _license(self, name: str) -> str:
        """Write the licence of an installed package, once; return its file, or "" without a package."""
        if not name:
            return ""
        title, text = license_of(name)
        file = f"licenses/{title}.txt"
        return file if file in self.hashes else self.put(file, text.encode())

    def _weights(self, parts: Parts, progress: Progress | None) -> Weights:
        if parts.weights is None:
            return Weights("none")
        if isinstance(parts.weights, int):
            return Weights("random", seed=parts.weights, negative=parts.negative)
        graph, source = parts.weights.graph, parts.weights.source
        written = write_rank_weights(graph, source, self.files, parts.ranks, progress)
        return Weights("packed", written)


def predictions(parts: Parts) -> dict[str, Any]:
    """Return roofline.json if the target's record is known, else nothing."""
    return {"roofline.json": roofline(parts.programs, parts.machine)} if parts.machine else {}


def _checked(program: Program) -> bytes:
    """Return the program's file after parsing it as the runtime does."""
    data = program.dump()
    Program.load(data, f"programs/{program.name}.json")
    return data


def _tokenizer_name(path: Path) -> str:
    """Return the file's name in the model folder; additional chat templates are in a subfolder."""
    inner = path.parent.name == TEMPLATE_DIR
    return f"{TEMPLATE_DIR}/{path.name}" if inner else path.name


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Diagnostic("E308", f"cannot read {path}: {os.strerror(error.errno or 0)}", "check the folder") from None


def states_of(m: Module) -> tuple[State, ...]:
    """Return the states of the module's entry points: tensors that the runtime keeps between steps."""
    states: dict[str, State] = {}
    for g in m.graphs.values():
        for v in g.inputs:
            if v.type.state:
                shape = tuple(parse_size(str(d)) for d in v.type.shape)
                states[v.name] = State(v.name, v.type.dtype, shape, _role(v.name))
    return tuple(states.values())


def _role(name: str) -> str:
    """Return the role of a state (`llmc_runtime.format.manifest.State`)."""
    if name.removeprefix(DRAFT_PREFIX).startswith("kv."):
        return "kv"
    return RECURRENT if name.startswith(STATES) else name.removeprefix("row.")


def license_of(name: str) -> tuple[str, str]:
    """Return ("name-version", all texts of licences and notices) of an installed distribution.

    Raises Diagnostic E506 if it has none: a binary is not written without the licence that allows it.
    """
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise _missing(name, "it is not installed") from None
    files = [f for f in package.files or () if f.name.upper().startswith(_NAMES)]
    license_files = [f for f in files if ".dist-info" in f.parts[0]]
    if not license_files:
        raise _missing(name, f"{package.version} contains no licence")
    texts = [f"{f.name}\n\n{f.read_text()}" for f in license_files]
    fields = package.metadata.json
    license = fields.get("license_expression") or fields.get("license") or ""
    return f"{name}-{package.version}", "\n\n".join([f"{name} {package.version}: {license}", *texts])


def _missing(name: str, why: str) -> Diagnostic:
    return Diagnostic("E506", f"the licence of {name} cannot be stored: {why}", "install the package again")
