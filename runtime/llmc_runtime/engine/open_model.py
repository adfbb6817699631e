"""Opens the files of a model, and begins to initialize its GPU meanwhile.

This module imports neither numpy nor the engine: they are imported while the GPU is initialized.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc_runtime.artifact import Artifact, require_digest
from llmc_runtime.device.open_device import discard_device, prepare_device
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.draft_artifact import open_with_draft
from llmc_runtime.format.manifest import Manifest


@contextmanager
def open_model(path: Path, options: EngineOptions, digest: str = "", number: int = 0) -> Iterator[Artifact]:
    """Open the artifact at `path`, and that of the draft model of `options`, for the block, which opens the engine with
    this number.

    Its GPU is initialized while the programs are read, and released if the block raises an error before.
    Raises LlmcError E1xx, E208, and E118 if its digest is not `digest` (empty: any).
    """
    manifests: list[Manifest] = []

    def begin(manifest: Manifest) -> None:
        manifests.append(manifest)
        prepare_device(manifest, number)

    try:
        artifact = open_with_draft(
            path, options.draft_model, verify=options.verify, threads=options.engine_threads, on_manifest=begin
        )
        if digest:
            require_digest(artifact, digest, "was opened before")
        yield artifact
    except BaseException:
        for manifest in manifests:
            discard_device(manifest, number)
        raise
