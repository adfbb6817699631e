"""The cache key of a compilation.

The key covers the contents of the source files, the options, the CPU's features if the target is "native", and the
files of the compiler and of packages that extend it. It does not depend on paths or times.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from llmc_runtime.format.names import TEMPLATE_DIR

_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt", ".bin"})
_NOT_SOURCE = frozenset({"requirements.txt"})


Uses = Callable[[EntryPoint], bool]


def every_extension(point: EntryPoint) -> bool:
    """Accept every extension."""
    return True


def artifact_key(source: Path, options: Mapping[str, str], root: Path, uses: Uses = every_extension) -> str:
    """Return the key, in hex. Two compilations have equal keys exactly if they would use the same input.

    `uses` returns whether the compilation may use the extension of an entry point.
    """
    machine = _cpu_features() if options.get("target", "native").endswith("native") else ""
    facts = {
        "files": source_hashes(source, root),
        "options": dict(sorted(options.items())),
        "machine": machine,
        "compiler": package_hash("llmc") + package_hash("llmc_runtime.format"),
        "extensions": extension_hashes(uses),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def extension_hashes(uses: Uses = every_extension) -> dict[str, str]:
    """Return module -> hash of its files for the installed packages that extend the compiler, without importing
    them. Only those that `uses` accepts count.
    """
    names: set[str] = set()
    for point in entry_points(group="llmc.extensions"):
        if point.module.partition(".")[0] != "llmc" and uses(point):
            names |= _modules(point)
    return {name: package_hash(name) for name in sorted(names)}


def _modules(point: EntryPoint) -> set[str]:
    """Return the module that an entry point names, and the other modules that its package declares."""
    names = {point.module.partition(".")[0]}
    if point.dist is not None:
        names.update((point.dist.read_text("top_level.txt") or "").split())
        names.update(f.parts[0].removesuffix(".py") for f in point.dist.files or () if f.suffix == ".py")
    return {n for n in names if n.isidentifier()}


def source_hashes(source: Path, root: Path) -> dict[str, str]:
    """Return file name -> sha256 of the files that a compilation reads.

    Hashes are cached in `root`; a file whose size, times and inode are unchanged is not read again.
    """
    files = sorted(p for p in source.iterdir() if p.suffix in _SUFFIXES and p.name not in _NOT_SOURCE and p.is_file())
    files += sorted((source / TEMPLATE_DIR).glob("*.jinja"))
    files += sorted(source.glob("*_Pooling/config.json"))
    memo_file = root / "hashes.json"
    memo = _read_memo(memo_file)
    stats = {p: _identity(p) for p in files}
    missing = [p for p in files if memo.get(str(p), ("", ""))[0] != stats[p]]
    with ThreadPoolExecutor(2) as pool:
        hashes = dict(zip(missing, pool.map(_file_hash, missing)))
    if missing:
        memo.update({str(p): (stats[p], hashes[p]) for p in missing})
        _write(memo_file, json.dumps(memo, indent=0).encode())
    return {p.relative_to(source).as_posix(): memo[str(p)][1] for p in files}


def _identity(path: Path) -> str:
    s = path.stat()
    return f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}"


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_memo(path: Path) -> dict[str, tuple[str, str]]:
    """Read the cached hashes; a damaged cache counts as empty."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {str(k): (str(v[0]), str(v[1])) for k, v in rows.items() if Path(k).exists()}
    except (OSError, ValueError, AttributeError, IndexError, TypeError, KeyError):
        return {}


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    partial.write_bytes(data)
    os.replace(partial, path)


def package_hash(name: str) -> str:
    """Return one hash of the files of an installed package or module, which is not imported; "" without it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        return ""
    digest = hashlib.sha256()
    roots = [Path(p) for p in spec.submodule_search_locations or ()]
    files = [(r, p) for r in roots for p in sorted(r.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    if not roots and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    for root, path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest() if files else ""


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    keys = ("flags", "Features")
    return next((" ".join(sorted(line.partition(":")[2].split())) for line in lines if line.startswith(keys)), "")
