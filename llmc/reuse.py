"""The cache of whole artifacts: entries are keyed by a compile's inputs and hard-linked to the output."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.format.cache_key import Uses, artifact_key, every_extension
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.names import MANIFEST_FILE

from llmc.artifact.hard_link import link_folder
from llmc.artifact.integrity import find_damage
from llmc.artifact.publish import check_free, locked, sweep


class Reuse:
    """The cache entry for one compile of `model` with `options`; disabled if `cache` is None."""

    def __init__(self, cache: Path | None, model: Path, options: Mapping[str, Any], uses: Uses = every_extension):
        """Compute the entry's path from a hash of the model's files, the options and the extensions that it `uses`."""
        self.entry: Path | None = None
        if cache is None or not model.is_dir():
            return
        (cache / "reuse").mkdir(parents=True, exist_ok=True)
        key = artifact_key(model, {k: json.dumps(v) for k, v in options.items()}, cache, uses)
        self.entry = cache / "reuse" / f"{key[:40]}.llmc"

    def find(self) -> Path | None:
        """Return the entry's path if it exists and all of its hashes are correct, else None."""
        return self.entry if self.entry is not None and intact(self.entry) else None

    def restore(self, out: Path, force: bool) -> None:
        """Link the files of the entry that `find` returned to `out`, atomically and under the lock of a compile."""
        assert self.entry is not None
        path = Path(os.path.abspath(out))
        with locked(path):
            check_free(path, force)
            sweep(path)
            link_folder(self.entry, path)

    def store(self, artifact: Path) -> None:
        """Store a finished artifact. Failures to write the cache are ignored."""
        if self.entry is None:
            return
        try:
            with locked(self.entry):
                sweep(self.entry)
                if self.entry.exists():
                    shutil.rmtree(self.entry)
                link_folder(artifact, self.entry)
        except (OSError, LlmcError):
            return


def intact(path: Path) -> bool:
    """Whether `path` is an artifact in which every size and hash is correct."""
    if not (path / MANIFEST_FILE).is_file():
        return False
    try:
        folder = Folder(path)
        return not find_damage(folder, folder.manifest(), threads=2)
    except (OSError, LlmcError):
        return False
