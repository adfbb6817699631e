"""Adds a small file (canary, result of `llmc eval`) to a finished artifact, which stays readable at every moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.manifest import FileInfo, Manifest
from llmc_runtime.format.names import MANIFEST_FILE

from llmc.artifact.files import Files, Hook, no_hook
from llmc.artifact.publish import PART, locked


def put_file(out: str | Path, name: str, data: bytes, hook: Hook = no_hook) -> Manifest:
    """Write or replace the file `name` of the artifact and return the new manifest.

    The manifest first drops the file, then the file is written, then the manifest lists it. Raises Diagnostic E121 or
    E123, and LlmcError if the artifact cannot be opened.
    """
    path = Path(os.path.abspath(out))
    with locked(path):
        manifest = Folder(path).manifest()
        files = Files(path, hook)
        others = {n: i for n, i in manifest.files.items() if n != name}
        if name in manifest.files:
            _replace(files, manifest, others)
        files.remove(name)  # unlink first: the file may be hard-linked from another artifact
        files.put(name, data)
        return _replace(files, manifest, {**others, name: FileInfo(sha256(data), len(data))})


def _replace(files: Files, manifest: Manifest, listed: Mapping[str, FileInfo]) -> Manifest:
    data = replace(manifest, files=listed).dump()
    files.put(PART, data, replace=True)
    files.rename(files.root / PART, files.root / MANIFEST_FILE)
    return Manifest.load(data)
