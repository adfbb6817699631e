"""An artifact opened for inspection: manifest, programs, reports and texts. Weights are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.program import Program

from llmc.artifact.cost_report import roofline
from llmc.artifact.integrity import open_undamaged
from llmc.artifact.report_schema import read_reports
from llmc.diagnostics import Diagnostic
from llmc.extension import load


@dataclass(frozen=True)
class Opened:
    """An opened artifact. `reports` holds the contents of report/ by file name without ".json"."""

    folder: Folder
    manifest: Manifest
    programs: tuple[Program, ...]
    reports: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The total bytes of the files."""
        m = self.manifest
        return sum(i.bytes for i in m.files.values()) + sum(w.bytes for w in m.weights.files)

    @property
    def stages(self) -> dict[str, str]:
        """Pass name -> file with the IR after it, in order; a repeated pass is listed as name.2."""
        out: dict[str, str] = {}
        for name in sorted(n for n in self.manifest.files if n.startswith("ir/") and n.endswith(".llir")):
            stage = base = name.removeprefix("ir/").removesuffix(".llir").partition("-")[2]
            again = 2
            while stage in out:
                stage, again = f"{base}.{again}", again + 1
            out[stage] = name
        return out

    def text(self, name: str) -> str:
        """Return the text of a small file, with invalid UTF-8 replaced."""
        return self.folder.read(name, self.manifest.files[name].bytes).decode("utf-8", "replace")

    def kernel_source(self, key: str) -> str:
        """Return a kernel's source text, "" if the artifact has none."""
        name = next((k.source for k in self.manifest.kernels if k.hash == key), "")
        return self.text(name) if name else ""

    def predictions(self) -> Mapping[str, Any]:
        """Return {"machine", "programs"} as the compiler wrote it or the target implies; {} if that is unknown."""
        if "roofline" in self.reports:
            return dict(self.reports["roofline"])
        try:
            return roofline(self.programs, load().target(self.manifest.target.name))
        except Diagnostic:
            return {}


def open_artifact(path: Path) -> Opened:
    """Open an artifact; raises LlmcError E101 to E108 if a size, or a hash of a small file, is wrong."""
    folder = Folder(path)
    m = open_undamaged(folder)
    programs = tuple(Program.load(folder.read(p, m.files[p].bytes), p, True) for p in m.programs)
    return Opened(folder, m, programs, read_reports(folder, m))
