"""Makes an artifact from the files of another one by hard links; only files that differ are written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest, Weights
from llmc_runtime.format.names import MANIFEST_FILE

from llmc.artifact.files import Files
from llmc.artifact.integrity import open_undamaged
from llmc.artifact.publish import OF_WEIGHTS, PART, locked, publish, sweep, temporary
from llmc.artifact.rank_weights import write_rank_weights
from llmc.artifact.weights import Progress
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph
from llmc.ir.weight_eval import WeightSource


def link_folder(source: Path, out: Path) -> None:
    """Link every file of the artifact `source` to `out`, the manifest last. The caller holds the lock of `out`."""
    with _linked(source, out) as files:
        files.put(PART, (source / MANIFEST_FILE).read_bytes())
        files.sync()
        publish(files, out)


def last_stage(path: Path) -> tuple[Manifest, str]:
    """Return the manifest, and the IR text after the last pass, of an artifact whose small files are intact.

    Raises LlmcError E101 to E107 if they are damaged, Diagnostic E328 if there is no IR text.
    """
    folder = Folder(path)
    manifest = open_undamaged(folder)
    last = max((n for n in manifest.files if n.startswith("ir/")), default="")
    if not last:
        raise Diagnostic("E328", f"{path} has no IR text in ir/ to pack weights with", "compile the model again")
    return manifest, folder.read(last, manifest.files[last].bytes).decode()


def pack_weights(artifact: Path, graph: Graph, source: WeightSource, progress: Progress | None = None) -> Manifest:
    """Evaluate the weights graph from `source` into an artifact without weights, or replace its weights.

    The artifact is replaced atomically. Raises LlmcError E1xx if it cannot be opened, Diagnostic E121, E123 or E124,
    and what `source` raises.
    """
    path = Path(os.path.abspath(artifact))
    with locked(path):
        sweep(path)
        manifest = Folder(path).manifest()
        with _linked(path, path, skip=("weights", *OF_WEIGHTS)) as files:
            written = write_rank_weights(graph, source, files, manifest.ranks, progress)
            others = {n: i for n, i in manifest.files.items() if n not in OF_WEIGHTS}
            manifest = replace(manifest, weights=Weights("packed", written), files=others)
            files.put(PART, manifest.dump())
            files.sync()
            publish(files, path)
    return manifest


@contextmanager
def _linked(source: Path, out: Path, skip: tuple[str, ...] = ()) -> Iterator[Files]:
    """A temporary folder next to `out` with links to the files of `source`, except its manifest and those that `skip`
    names, or whose top folder it names.
    """
    with temporary(out) as files:
        for path in sorted(p for p in source.rglob("*") if p.is_file() and not p.is_symlink()):
            name = path.relative_to(source)
            if name.as_posix() in (MANIFEST_FILE, PART, *skip) or name.parts[0] in skip:
                continue
            (files.root / name).parent.mkdir(parents=True, exist_ok=True)
            _link(path, files.root / name)
        yield files


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # a different file system
        shutil.copyfile(old, new)
