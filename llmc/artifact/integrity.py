"""Checks the names, sizes and hashes of an artifact's files."""

from __future__ import annotations

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest


def find_damage(folder: Folder, manifest: Manifest, threads: int = 0) -> list[LlmcError]:
    """Return the errors E104 to E108 of the small files and, with `threads` to hash them, of the weight files."""
    damage = list(folder.sizes(manifest))
    if damage:
        return damage
    damage += folder.check_small(manifest.files)
    for file in manifest.weights.files if threads else ():
        damage += folder.check_weights(file, folder.map(file.file), threads)
    return damage


def open_undamaged(folder: Folder) -> Manifest:
    """Return the manifest; raises LlmcError E101 to E108 for the first damaged size, or hash of a small file."""
    manifest = folder.manifest()
    for error in find_damage(folder, manifest):
        raise error
    return manifest
