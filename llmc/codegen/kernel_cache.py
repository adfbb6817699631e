"""Entries of the cache of compiled GPU kernels: one file per key. A damaged entry counts as absent."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from llmc.codegen.toolchain import Compiled

SUFFIX = "gpu"


def entry_path(cache: Path, key: str) -> Path:
    """Return the path of a key's entry."""
    return cache / f"{key}.{SUFFIX}"


def read_entry(path: Path) -> Compiled | None:
    """Read an entry (one line of JSON, then the binary); None if it is absent, truncated or modified."""
    try:
        head, _, binary = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        intact = hashlib.sha256(binary).hexdigest() == facts["sha256"]
        boxes = tuple((tuple(map(int, box)), int(swizzle)) for box, swizzle in facts.get("boxes", ()))
        return Compiled(binary, int(facts["threads"]), int(facts["shared"]), boxes) if intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(path: Path, c: Compiled) -> None:
    """Write an entry atomically."""
    head = {"threads": c.threads, "shared": c.shared, "sha256": hashlib.sha256(c.binary).hexdigest(), "boxes": c.boxes}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        entry = Path(folder, "entry")
        entry.write_bytes(json.dumps(head).encode() + b"\n" + c.binary)
        os.replace(entry, path)
