"""The manifest: the description of an artifact, with the hashes of its files and of itself.

The file begins with its digest, which is the SHA-256 of the file's bytes with the 64 digits of the digest set to zero.
The manifest is written last, so that an artifact with a manifest is complete.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.dtypes import DTYPE_BITS
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.hashing import BLOCK, sha256
from llmc_runtime.format.json_fields import (
    Fields,
    a_hash,
    a_name,
    a_text,
    an_integer,
    anything,
    check_name,
    damaged,
    load_json,
)
from llmc_runtime.format.launch_param import a_size
from llmc_runtime.format.names import DRAFT_MODEL, MANIFEST_FILE, MAX_RANKS
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.program import DRAFT_PREFIX
from llmc_runtime.format.record import Record, nullable, stored

MAJOR, MINOR = 2, 5
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@+-]{0,120}\Z")
MODES = ("packed", "random", "none")
_HEAD = b'{\n  "digest": "'
_PREFIX = re.compile(re.escape(_HEAD) + rb"([0-9a-f]{64})\"")
_ZERO = b"0" * 64
_MAX_SIZE = 1 << 48


@dataclass(frozen=True)
class FileInfo(Record):
    """A small file: its SHA-256 and its size."""

    sha256: str = stored(Fields.hash)
    bytes: int = stored(Fields.integer)


@dataclass(frozen=True)
class WeightFile(Record):
    """A weight file, with one SHA-256 for every `block` bytes. Only `rank` reads it; None: all ranks."""

    file: str = stored(Fields.name)
    bytes: int = stored(Fields.integer)
    blocks: tuple[str, ...] = stored(Fields.list, item=a_hash)
    block: int = stored(Fields.integer, BLOCK, absent=MISSING, low=1 << 12, high=1 << 32)
    rank: int | None = stored(nullable(Fields.integer), None, omitted=True, high=MAX_RANKS - 1)

    def validate(self, where: str) -> None:
        """See Record."""
        if len(self.blocks) != -(-self.bytes // self.block):
            raise damaged(where, "has the wrong number of block hashes")


@dataclass(frozen=True)
class Weights(Record):
    """The weights. `mode` is "packed" (in files), "random" (generated from `seed`) or "none" (to be packed later).

    `negative` names the random weights that are -1, such as rates of decay.
    """

    json_order = ("mode", "seed", "negative", "files")

    mode: str = stored(Fields.text)
    files: tuple[WeightFile, ...] = stored(Fields.list, (), item=WeightFile)
    seed: int = stored(Fields.integer, 0)
    negative: tuple[str, ...] = stored(Fields.list, (), item=a_text, omitted=True)

    def validate(self, where: str) -> None:
        """See Record."""
        if self.mode not in MODES:
            raise damaged(where, f"unknown mode {self.mode!r}")

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(w.bytes for w in self.files)

    def of_rank(self, rank: int) -> tuple[WeightFile, ...]:
        """Return the files that a rank reads."""
        return tuple(w for w in self.files if w.rank in (None, rank))


@dataclass(frozen=True)
class KernelFile(Record):
    """A kernel binary and its source text. `abi` names its calling convention.

    `threads` is the size of a thread block, and `shared` its dynamic shared memory in bytes; both are for GPUs.
    `license` is the file with the licence of a kernel from another project; empty for llmc's own.
    """

    hash: str = stored(Fields.key)
    file: str = stored(Fields.name)
    source: str = stored(Fields.name, absent="")
    entry: str = stored(Fields.text)
    threads: int = stored(Fields.integer, 0)
    shared: int = stored(Fields.integer, 0)
    abi: str = stored(Fields.text, "cpu-1", absent=MISSING)
    license: str = stored(Fields.name, "")


DRAFT_ROLES = ("reach", "draft_allowed")  # roles of row states that only a draft model has
RECURRENT = "recurrent"  # the role of states of recurrent layers
_SNAPSHOT_ALIGN = 256  # bytes; of each state in a snapshot


@dataclass(frozen=True)
class State(Record):
    """A persistent buffer. `role` is "kv", RECURRENT, or the content of its rows: tokens, length, pages, fparams,
    iparams, stops, seen, counts, bias_ids, biases, allowed, drafts or reach.

    States of the role RECURRENT are those of recurrent layers, which only programs read and write.
    """

    name: str = stored(Fields.text)
    dtype: str = stored(Fields.text)
    shape: tuple[Expr, ...] = stored(Fields.list, item=a_size, cap=16)
    role: str = stored(Fields.text)

    def validate(self, where: str) -> None:
        """See Record."""
        if self.dtype not in DTYPE_BITS:
            raise damaged(where, f"unknown dtype {self.dtype[:40]!r}")
        if not self.shape or any(d.const is not None and d.const < 1 for d in self.shape):
            shape = ", ".join(str(d)[:40] for d in self.shape[:4])
            raise damaged(where, f"{self.name[:40]!r} has the shape [{shape}]")

    @property
    def of_draft(self) -> bool:
        """Whether only a draft model, a head or a layer that drafts writes it."""
        return self.name.startswith(DRAFT_PREFIX) or self.role in DRAFT_ROLES

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Return the size in bytes, with the symbols' values from `env`."""
        return -(-math.prod((DTYPE_BITS[self.dtype], *(d(env) for d in self.shape))) // 8)

    @property
    def row_bytes(self) -> int:
        """The size of one row in bytes, of a state whose first axis is the device rows."""
        return self.nbytes({}) // self.shape[0]({})


def in_snapshot(state: State) -> int:
    """Return the bytes that a recurrent layer's state takes in a snapshot of one row."""
    return -(-state.row_bytes // _SNAPSHOT_ALIGN) * _SNAPSHOT_ALIGN


@dataclass(frozen=True)
class Source(Record):
    """The compiled model: its kind ("hf"), name, revision, and the SHA-256 of its files.

    A partial build has the first `layers` of `of_layers` layers; both are 0 for the whole model.
    """

    kind: str = stored(Fields.text)
    name: str = stored(Fields.text)
    revision: str = stored(Fields.text, "")
    files: Mapping[str, str] = stored(Fields.table, factory=dict, absent=MappingProxyType({}), item=a_hash)
    layers: int = stored(Fields.integer, 0)
    of_layers: int = stored(Fields.integer, 0)

    @property
    def part(self) -> str:
        """A description of a partial build; "" for the whole model."""
        return f"the first {self.layers} of {self.of_layers} layers" if self.layers else ""


@dataclass(frozen=True)
class TargetInfo(Record):
    """The compilation target. `features` uses the names in /proc/cpuinfo."""

    name: str = stored(Fields.text)
    arch: str = stored(Fields.text)
    features: tuple[str, ...] = stored(Fields.list, item=a_text, cap=1024)


@dataclass(frozen=True)
class Limits(Record):
    """The maximum sequence length in tokens, number of sequences, and tokens per step."""

    max_model_len: int = stored(Fields.integer, high=_MAX_SIZE)
    max_num_seqs: int = stored(Fields.integer, high=_MAX_SIZE)
    max_num_batched_tokens: int = stored(Fields.integer, high=_MAX_SIZE)


@dataclass(frozen=True)
class Kv(Record):
    """KV geometry: tokens per page, number of layers with KV, and bytes per page over all layers."""

    page_size: int = stored(Fields.integer, high=_MAX_SIZE)
    layers: int = stored(Fields.integer, high=_MAX_SIZE)
    bytes_per_page: int = stored(Fields.integer, high=_MAX_SIZE)
    dtype: str = stored(Fields.text)


def kv_of(states: Iterable[State], page_size: int) -> Kv:
    """Return the KV geometry that the states imply."""
    kv = [s for s in states if s.role == "kv"]
    return Kv(page_size, len(kv), sum(s.nbytes({"P": 1}) for s in kv), kv[0].dtype if kv else "")


def _read_tokenizer(reader: Fields, key: str) -> tuple[str, ...]:
    tokenizer = reader.sub(key)
    names = tokenizer.list("files", a_name, cap=1024)
    tokenizer.close(("files",))
    return names


def _write_tokenizer(names: tuple[str, ...]) -> dict[str, list[str]]:
    return {"files": list(names)}


def _read_version(reader: Fields, key: str) -> tuple[int, int]:
    version = reader.get(key)  # `check_version` has checked it
    return version["major"], version["minor"]


def _write_version(version: tuple[int, int]) -> dict[str, int]:
    return {"major": version[0], "minor": version[1]}


@dataclass(frozen=True)
class Manifest(Record):
    """Everything that the runtime needs before it opens other files.

    deterministic: whether the results of a request have the same bits in every batch (compiled with --deterministic).
    pooling: None if the model generates.
    role: DRAFT_MODEL if the artifact has only the programs of a draft model, which drafts for models with the same
        target, limits, row states and ranks; "" otherwise.
    ranks: the number of processes that an engine of this artifact consists of. Limits are those of all of them
        together; states, the KV geometry and programs are those of one.
    """

    json_order = (
        "format", "compiler", "role", "ranks", "source", "target", "limits", "kv", "vocab_size", "eos_token_ids",
        "generation", "deterministic", "pooling", "kernels", "states", "programs", "weights", "tokenizer", "files",
    )  # fmt: skip

    compiler: str = stored(Fields.text)
    source: Source = stored(Fields.item, item=Source)
    target: TargetInfo = stored(Fields.item, item=TargetInfo)
    limits: Limits = stored(Fields.item, item=Limits)
    kv: Kv = stored(Fields.item, item=Kv)
    vocab_size: int = stored(Fields.integer, low=1, high=1 << 31)
    eos_token_ids: tuple[int, ...] = stored(Fields.list, item=an_integer, cap=4096)
    generation: Mapping[str, Any] = stored(Fields.table, absent=MappingProxyType({}), item=anything)
    kernels: tuple[KernelFile, ...] = stored(Fields.list, item=KernelFile)
    states: tuple[State, ...] = stored(Fields.list, item=State)
    programs: tuple[str, ...] = stored(Fields.list, item=a_name, cap=1024)
    weights: Weights = stored(Fields.item, item=Weights)
    tokenizer: tuple[str, ...] = stored(_read_tokenizer, write=_write_tokenizer)
    files: Mapping[str, FileInfo] = stored(Fields.table, item=FileInfo)
    format: tuple[int, int] = stored(_read_version, (MAJOR, MINOR), absent=MISSING, write=_write_version)
    digest: str = stored(Fields.text, "", absent=MISSING)
    deterministic: bool = stored(Fields.flag, False)
    pooling: Pooling | None = stored(nullable(Fields.item), None, item=Pooling)
    ranks: int = stored(Fields.integer, 1, omitted=True, low=1, high=MAX_RANKS)
    role: str = stored(Fields.text, "", omitted=True)

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file of the artifact besides the manifest, by name."""
        return {n: i.bytes for n, i in self.files.items()} | {w.file: w.bytes for w in self.weights.files}

    @property
    def is_draft_model(self) -> bool:
        """Whether it is the artifact of a draft model."""
        return self.role == DRAFT_MODEL

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent layers."""
        return any(s.role == RECURRENT for s in self.states)

    @property
    def bytes_per_snapshot(self) -> int:
        """The size of a snapshot of one row's states of recurrent layers, in bytes; 0 without such layers."""
        return sum(in_snapshot(s) for s in self.states if s.role == RECURRENT)

    def validate(self, where: str) -> None:
        """See Record: every referenced file is listed exactly once, with its hash."""
        if self.role not in ("", DRAFT_MODEL):
            raise damaged(where, f"unknown role {self.role[:40]!r}")
        for name in self.files:
            check_name(name, where)
        kernels = self.kernels
        referenced = [*self.programs, *self.tokenizer, *(k.file for k in kernels)]
        referenced += [name for k in kernels for name in (k.source, k.license) if name]
        missing = [n for n in referenced if n not in self.files]
        if missing:
            raise damaged(where, f"{missing[0]} has no hash")
        big = [w.file for w in self.weights.files]
        if len(set(big)) != len(big) or set(big) & set(self.files) or MANIFEST_FILE in self.files:
            raise damaged(where, "a file is listed twice")
        if any(w.rank is not None and w.rank >= self.ranks for w in self.weights.files):
            raise damaged(where, f"a weight file is of a rank that a group of {self.ranks} lacks")
        if (self.weights.mode == "packed") != bool(big):
            raise damaged(where, f"weights of mode {self.weights.mode!r} cannot have {len(big)} files")
        for kind, names in (("kernels", [k.hash for k in kernels]), ("states", [s.name for s in self.states])):
            if len(set(names)) != len(names):
                raise damaged(where, f"two {kind} have the same name")

    def dump(self) -> bytes:
        """Serialize to the file's bytes, with the digest. `load(dump())` returns this manifest with `digest` set."""
        body = json.dumps(self.json(), indent=1, allow_nan=False).encode()
        # The digest comes first in the file, at a fixed place: see check_digest.
        text = _HEAD + _ZERO + b'",\n ' + body.removeprefix(b"{\n ") + b"\n"
        return text.replace(_ZERO, sha256(text).encode(), 1)

    @staticmethod
    def load(data: bytes, where: str = MANIFEST_FILE) -> Manifest:
        """Parse a manifest file.

        Raises LlmcError E102 for another format version, and E103 if the digest does not match or a field is invalid.
        """
        _, intact = check_digest(data)
        try:
            doc = load_json(data, where)
        except LlmcError:
            raise damaged(where, "its bytes do not match its digest") from None
        lenient = check_version(doc, where)
        if not intact:
            raise damaged(where, "its bytes do not match its digest")
        return Manifest.read(doc, where, lenient)


def check_digest(data: bytes) -> tuple[str, bool]:
    """Return the digest stated in the manifest's bytes ("" if there is none), and whether it matches them."""
    match = _PREFIX.match(data)
    if match is None:
        return "", False
    claimed = match[1].decode()
    return claimed, sha256(data[: match.start(1)] + _ZERO + data[match.end(1) :]) == claimed


def check_version(doc: Any, where: str) -> bool:
    """Check the format version. Returns whether unknown fields are to be ignored, because the minor version is newer.

    Raises LlmcError E102 for another major version.
    """
    version = doc.get("format") if isinstance(doc, dict) else None
    major, minor = (version.get("major"), version.get("minor")) if isinstance(version, dict) else (None, None)
    if not isinstance(major, int) or not isinstance(minor, int):
        raise damaged(where, "does not state a format version")
    if major != MAJOR:
        cause = f"{where}: the artifact has format version {major}.{minor}; this runtime reads version {MAJOR}"
        raise LlmcError("E102", cause, "upgrade llmc-aot" if major > MAJOR else _recompile(doc, where))
    return minor > MINOR


def _recompile(doc: dict[str, Any], where: str) -> str:
    """Return the command that recompiles an older artifact, with the model and target that its manifest states."""
    names = [x.get("name") if isinstance(x, dict) else None for x in (doc.get("source"), doc.get("target"))]
    # The digest is not checked yet: only plain names go into a command that users copy into a shell.
    model, target = (x if isinstance(x, str) and _PLAIN.match(x) else "" for x in names)
    chosen = f" --target {target}" if target else ""
    command = f"llmc compile {model or 'MODEL'}{chosen} -o {shlex.quote(str(Path(where).parent))} --force"
    return f"recompile it, with the options in its report/compile.json: {command}"
