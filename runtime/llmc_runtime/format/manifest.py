"""The manifest: the description of an artifact, with the hashes of its files and of itself.

The file begins with its digest, which is the SHA-256 of the file's bytes with the 64 digits of the digest set to zero.
The manifest is written last, so that an artifact with a manifest is complete.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.hashing import BLOCK, sha256
from llmc_runtime.format.json_fields import Fields, a_hash, a_name, a_text, an_integer, check_name, damaged, load_json
from llmc_runtime.format.launch_param import a_size
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.program import DTYPE_BITS, MAX_RANKS

MAJOR, MINOR = 2, 4
NAME = "manifest.json"
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@+-]{0,120}\Z")
MODES = ("packed", "random", "none")
_HEAD = b'{\n  "digest": "'
_PREFIX = re.compile(re.escape(_HEAD) + rb"([0-9a-f]{64})\"")
_ZERO = b"0" * 64


@dataclass(frozen=True)
class FileInfo:
    """A small file: its SHA-256 and its size."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class WeightFile:
    """A weight file, with one SHA-256 for every `block` bytes. Only `rank` reads it; None: all ranks."""

    file: str
    bytes: int
    blocks: tuple[str, ...]
    block: int = BLOCK
    rank: int | None = None

    def json(self) -> dict[str, Any]:
        """Return the file as JSON values; `rank` only if one rank reads it."""
        out = {"file": self.file, "bytes": self.bytes, "blocks": list(self.blocks), "block": self.block}
        return out if self.rank is None else {**out, "rank": self.rank}


@dataclass(frozen=True)
class Weights:
    """The weights. `mode` is "packed" (in files), "random" (generated from `seed`) or "none" (to be packed later)."""

    mode: str
    files: tuple[WeightFile, ...] = ()
    seed: int = 0

    def of_rank(self, rank: int) -> tuple[WeightFile, ...]:
        """Return the files that a rank reads."""
        return tuple(w for w in self.files if w.rank in (None, rank))


@dataclass(frozen=True)
class KernelFile:
    """A kernel binary and its source text. `abi` names its calling convention.

    `threads` is the size of a thread block, and `shared` its dynamic shared memory in bytes; both are for GPUs.
    `license` is the file with the licence of a kernel from another project; empty for llmc's own.
    """

    hash: str
    file: str
    source: str
    entry: str
    threads: int = 0
    shared: int = 0
    abi: str = "cpu-1"
    license: str = ""


@dataclass(frozen=True)
class State:
    """A persistent buffer. `role` is "kv", or the content of its rows: tokens, length, pages, fparams, iparams, stops,
    seen, counts, bias_ids, biases, allowed, drafts or reach.
    """

    name: str
    dtype: str
    shape: tuple[Expr, ...]
    role: str

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Return the size in bytes, with the symbols' values from `env`."""
        total = DTYPE_BITS[self.dtype]
        for d in self.shape:
            total *= d(env)
        return -(-total // 8)


@dataclass(frozen=True)
class Source:
    """The compiled model: its kind ("hf"), name, revision, and the SHA-256 of its files.

    A partial build has the first `layers` of `of_layers` layers; both are 0 for the whole model.
    """

    kind: str
    name: str
    revision: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    layers: int = 0
    of_layers: int = 0

    @property
    def part(self) -> str:
        """A description of a partial build; "" for the whole model."""
        return f"the first {self.layers} of {self.of_layers} layers" if self.layers else ""


@dataclass(frozen=True)
class TargetInfo:
    """The compilation target. `features` uses the names in /proc/cpuinfo."""

    name: str
    arch: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Limits:
    """The maximum sequence length in tokens, number of sequences, and tokens per step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Kv:
    """KV geometry: tokens per page, number of layers with KV, and bytes per page over all layers."""

    page_size: int
    layers: int
    bytes_per_page: int
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """Everything that the runtime needs before it opens other files.

    deterministic: whether the results of a request have the same bits in every batch (compiled with --deterministic).
    pooling: None if the model generates.
    ranks: the number of processes that an engine of this artifact consists of. Limits are those of all of them
        together; states, the KV geometry and programs are those of one.
    """

    compiler: str
    source: Source
    target: TargetInfo
    limits: Limits
    kv: Kv
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, Any]
    kernels: tuple[KernelFile, ...]
    states: tuple[State, ...]
    programs: tuple[str, ...]
    weights: Weights
    tokenizer: tuple[str, ...]
    files: Mapping[str, FileInfo]
    format: tuple[int, int] = (MAJOR, MINOR)
    digest: str = ""
    deterministic: bool = False
    pooling: Pooling | None = None
    ranks: int = 1

    def json(self) -> dict[str, Any]:
        """Return the manifest as JSON values, without the digest."""
        return {
            "format": {"major": self.format[0], "minor": self.format[1]},
            "compiler": self.compiler,
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            "source": {**vars(self.source), "files": dict(self.source.files)},
            "target": {**vars(self.target), "features": list(self.target.features)},
            "limits": dict(vars(self.limits)),
            "kv": dict(vars(self.kv)),
            "vocab_size": self.vocab_size,
            "eos_token_ids": list(self.eos_token_ids),
            "generation": dict(self.generation),
            "deterministic": self.deterministic,
            "pooling": None if self.pooling is None else self.pooling.json(),
            "kernels": [dict(vars(k)) for k in self.kernels],
            "states": [{**vars(s), "shape": [str(d) for d in s.shape]} for s in self.states],
            "programs": list(self.programs),
            "weights": {
                "mode": self.weights.mode,
                "seed": self.weights.seed,
                "files": [w.json() for w in self.weights.files],
            },
            "tokenizer": {"files": list(self.tokenizer)},
            "files": {n: dict(vars(i)) for n, i in self.files.items()},
        }

    def dump(self) -> bytes:
        """Serialize to the file's bytes, including the digest. `load(dump())` returns this manifest with `digest`
        set.
        """
        body = json.dumps(self.json(), indent=1, allow_nan=False).encode()
        # The digest comes first in the file, at a fixed place: see check_digest.
        text = _HEAD + _ZERO + b'",\n ' + body.removeprefix(b"{\n ") + b"\n"
        return text.replace(_ZERO, sha256(text).encode(), 1)

    @staticmethod
    def load(data: bytes, where: str = NAME) -> Manifest:
        """Parse a manifest file.

        Raises LlmcError E102 for another format version, and E103 if the digest does not match or a field is invalid.
        """
        digest, intact = check_digest(data)
        try:
            doc = load_json(data, where)
        except LlmcError:
            raise damaged(where, "is damaged: its bytes do not match its digest") from None
        lenient = check_version(doc, where)
        if not intact:
            raise damaged(where, "is damaged: its bytes do not match its digest")
        return _read(doc, where, lenient, digest)


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
    output = shlex.quote(str(Path(where).parent))
    return f"recompile it with this version of llmc: llmc compile {model or 'MODEL'}{chosen} -o {output} --force"


def _read(doc: Any, where: str, lenient: bool, digest: str) -> Manifest:
    """Read a manifest's JSON (`lenient`: with unknown fields). Raises LlmcError E103 or E104 if it is invalid."""
    f = Fields(doc, where, lenient)
    f.text("digest")
    version = f.get("format")
    tokenizer = f.sub("tokenizer")
    m = Manifest(
        digest=digest,
        format=(version["major"], version["minor"]),
        compiler=f.text("compiler"),
        ranks=f.integer("ranks", 1, low=1, high=MAX_RANKS),
        source=_source(f.sub("source")),
        target=_target(f.sub("target")),
        limits=Limits(**_counts(f.sub("limits"), "max_model_len", "max_num_seqs", "max_num_batched_tokens")),
        kv=_kv(f.sub("kv")),
        vocab_size=f.integer("vocab_size", low=1, high=1 << 31),
        eos_token_ids=f.list("eos_token_ids", an_integer, cap=4096),
        generation=MappingProxyType(f.table("generation", lambda v, w: v, {})),
        deterministic=f.flag("deterministic", False),
        kernels=f.list("kernels", lambda v, w: _kernel(Fields(v, w, lenient))),
        states=f.list("states", lambda v, w: _state(Fields(v, w, lenient))),
        programs=f.list("programs", a_name, cap=1024),
        weights=_weights(f.sub("weights"), lenient),
        tokenizer=tokenizer.list("files", a_name, cap=1024),
        files=MappingProxyType(f.table("files", lambda v, w: _file(Fields(v, w, lenient)))),
        pooling=_pooling(f.get("pooling", None), f"{where}.pooling", lenient),
    )
    tokenizer.close()
    f.close()
    _check(m, where)
    return m


def _source(f: Fields) -> Source:
    cut = f.integer("layers", 0), f.integer("of_layers", 0)
    s = Source(f.text("kind"), f.text("name"), f.text("revision", ""), f.table("files", a_hash, {}), *cut)
    f.close()
    return s


def _target(f: Fields) -> TargetInfo:
    t = TargetInfo(f.text("name"), f.text("arch"), f.list("features", a_text, cap=1024))
    f.close()
    return t


def _kv(f: Fields) -> Kv:
    dtype = f.text("dtype")
    return Kv(**_counts(f, "page_size", "layers", "bytes_per_page"), dtype=dtype)


def _counts(f: Fields, *names: str) -> dict[str, int]:
    out = {n: f.integer(n, low=0, high=1 << 48) for n in names}
    f.close()
    return out


def _kernel(f: Fields) -> KernelFile:
    k = KernelFile(
        hash=f.key("hash"), file=f.name("file"), source=f.name("source", ""), entry=f.text("entry"),
        threads=f.integer("threads", 0), shared=f.integer("shared", 0), abi=f.text("abi"),
        license=f.name("license", ""),
    )  # fmt: skip
    f.close()
    return k


def _state(f: Fields) -> State:
    s = State(f.text("name"), f.text("dtype"), f.list("shape", a_size, cap=16), f.text("role"))
    f.close()
    if s.dtype not in DTYPE_BITS:
        raise damaged(f.where, f"unknown dtype {s.dtype[:40]!r}")
    if not s.shape or any(d.const is not None and d.const < 1 for d in s.shape):
        raise damaged(f.where, f"{s.name[:40]!r} has the shape [{', '.join(str(d)[:40] for d in s.shape[:4])}]")
    return s


def _weights(f: Fields, lenient: bool) -> Weights:
    def weight_file(value: Any, where: str) -> WeightFile:
        g = Fields(value, where, lenient)
        block = g.integer("block", low=1 << 12, high=1 << 32)
        rank = None if g.get("rank", None) is None else g.integer("rank", high=MAX_RANKS - 1)
        w = WeightFile(g.name("file"), g.integer("bytes"), g.list("blocks", a_hash), block, rank)
        g.close()
        if len(w.blocks) != -(-w.bytes // w.block):
            raise damaged(where, "has the wrong number of block hashes")
        return w

    w = Weights(f.text("mode"), f.list("files", weight_file, []), f.integer("seed", 0))
    f.close()
    if w.mode not in MODES:
        raise damaged(f.where, f"unknown mode {w.mode!r}")
    return w


def _pooling(value: Any, where: str, lenient: bool) -> Pooling | None:
    return None if value is None else Pooling.read(value, where, lenient)


def _file(f: Fields) -> FileInfo:
    i = FileInfo(f.hash("sha256"), f.integer("bytes"))
    f.close()
    return i


def _check(m: Manifest, where: str) -> None:
    """Check constraints between fields: every referenced file is listed exactly once, with its hash."""
    for name in m.files:
        check_name(name, where)
    referenced = [*m.programs, *m.tokenizer, *(k.file for k in m.kernels), *(k.source for k in m.kernels if k.source)]
    referenced += [k.license for k in m.kernels if k.license]
    missing = [n for n in referenced if n not in m.files]
    if missing:
        raise damaged(where, f"{missing[0]} has no hash")
    big = [w.file for w in m.weights.files]
    if len(set(big)) != len(big) or set(big) & set(m.files) or NAME in m.files:
        raise damaged(where, "a file is listed twice")
    if any(w.rank is not None and w.rank >= m.ranks for w in m.weights.files):
        raise damaged(where, f"a weight file is of a rank that a group of {m.ranks} lacks")
    if (m.weights.mode == "packed") != bool(big):
        raise damaged(where, f"weights of mode {m.weights.mode!r} cannot have {len(big)} files")
    for what, names in (("kernels", [k.hash for k in m.kernels]), ("states", [s.name for s in m.states])):
        if len(set(names)) != len(names):
            raise damaged(where, f"two {what} have the same name")
