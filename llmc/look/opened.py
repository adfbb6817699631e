"""An artifact as people look at it: manifest, programs, reports and texts, checked and read; weights stay in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.program import Program

from llmc.artifact.report import roofline
from llmc.artifact.reports import read_reports
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.targets.names import parse as parse_target


@dataclass(frozen=True)
class Opened:
    """`reports`: what report/ holds, by file name without ".json"; what an artifact has not is not there."""

    folder: Folder
    manifest: Manifest
    programs: tuple[Program, ...]
    reports: Mapping[str, Any]

    @property
    def stages(self) -> dict[str, str]:
        """Pass name (a second run of a pass as name.2) -> the file with the IR after it, in order."""
        out: dict[str, str] = {}
        for name in sorted(n for n in self.manifest.files if n.startswith("ir/") and n.endswith(".llir")):
            stage = base = name.removeprefix("ir/").removesuffix(".llir").partition("-")[2]
            again = 2
            while stage in out:
                stage, again = f"{base}.{again}", again + 1
            out[stage] = name
        return out

    def text(self, name: str) -> str:
        """A small file's text; bytes that are no UTF-8 are shown as question marks."""
        return self.folder.read(name, self.manifest.files[name].bytes).decode("utf-8", "replace")

    def kernel_source(self, key: str) -> str:
        name = next((k.source for k in self.manifest.kernels if k.hash == key), "")
        return self.text(name) if name else ""

    def predictions(self) -> Mapping[str, Any]:
        """{"machine", "programs"} as the compiler wrote it, else by the target's record; {} for an unknown target."""
        if "roofline" in self.reports:
            return dict(self.reports["roofline"])
        try:
            return roofline(self.programs, parse_target(self.manifest.target.name, load().targets))
        except Diagnostic:
            return {}


def open_to_look(path: Path) -> Opened:
    """Open an artifact for people. LlmcError E101 to E108 where a size or a hash of a small file is wrong."""
    folder = Folder(path)
    m = folder.manifest()
    problems: Sequence[Any] = [*folder.sizes(m)] or [*folder.check_small(m.files)]
    if problems:
        raise problems[0]
    programs = tuple(Program.load(folder.read(p, m.files[p].bytes), p, True) for p in m.programs)
    return Opened(folder, m, programs, read_reports(folder, m))
