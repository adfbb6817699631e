"""An artifact opened for inspection: manifest, programs, reports and texts. Weights are not read.

Reports are checked against the schema in which they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.folder import Folder
from llmc_runtime.format.json_fields import damaged, load_json
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.program import Program

from llmc.artifact.cost_report import roofline
from llmc.artifact.integrity import open_undamaged
from llmc.diagnostics import Diagnostic
from llmc.extension import load

# A form is a type, [form] for a list, or a mapping from keys to forms: a key is required unless it ends in "?"; "*" is
# the form of all other keys.
_TEXT, _COUNT, _NUMBER = str, int, float
_SIGNED = "signed"  # a number that may be negative
_NODES = MappingProxyType({"op": _TEXT, "loc": _TEXT, "count": _COUNT})
_RULE = MappingProxyType({**_NODES, "rule": _TEXT})
_LAUNCH = MappingProxyType(
    {"op": _TEXT, "loc": _TEXT, "kernel": _TEXT, "us": _NUMBER, "flops": _NUMBER, "bytes": _NUMBER}
)
_SIZES = MappingProxyType({"*": _COUNT})
_SLOT = MappingProxyType({
    "name": _TEXT, "type": _TEXT, "loc": _TEXT, "offset": _COUNT, "nbytes": _COUNT, "first": _COUNT, "last": _COUNT,
})  # fmt: skip
_CHOICE = MappingProxyType({"kernel": _TEXT, "schedule": {}, "us": _NUMBER})
_FORMS: Mapping[str, Any] = MappingProxyType(
    {
        "roofline": {
            "machine": {
                "name": _TEXT, "flops": {"f32": _NUMBER, "*": _NUMBER}, "bandwidth": _NUMBER, "launch_us": _NUMBER,
            },
            "programs": {"*": {"sizes": _SIZES, "us": _NUMBER, "launches": [_LAUNCH]}},
        },
        "memory": {"*": object},
        "eval": {
            "text": {"name": _TEXT}, "context": _COUNT, "windows": _COUNT, "tokens": _COUNT, "perplexity": _NUMBER,
            "perplexity_stderr": _NUMBER, "bits_per_byte": _NUMBER, "against": object,
        },
        "compile": {"options": {}, "notes": [_TEXT], "versions": {"*": _TEXT}},
        "passes": [
            {
                "pass": _TEXT, "changes": _COUNT, "graphs": _COUNT, "nodes": _COUNT, "applied": [_RULE],
                "missed": [_RULE], "made": [_NODES], "gone": [_NODES],
            }
        ],
        "choices": [
            {
                "graph": _TEXT, "node": _TEXT, "loc": _TEXT, **_CHOICE, "measured": object, "ways": _COUNT,
                "count": _COUNT, "sizes": _SIZES, "others": [_CHOICE], "refused?": {"*": _TEXT},
            }
        ],
    }
)  # fmt: skip
_PEAKS = ("report/roofline.json.machine.flops", "report/roofline.json.machine.bandwidth")  # divisors: must be positive
_AGAINST = MappingProxyType({
    "name": _TEXT, "target": _TEXT, "digest": _TEXT, "perplexity": _NUMBER, "perplexity_stderr": _NUMBER,
    "perplexity_change_percent": _SIGNED, "top1_agreement_percent": _NUMBER, "kl_mean": _NUMBER, "kl_stderr": _NUMBER,
    "kl_p99": _NUMBER, "kl_max": _NUMBER,
})  # fmt: skip
_PLAN = MappingProxyType({"arena_bytes": _COUNT, "values": _COUNT, "slots": [_SLOT]})


def read_reports(folder: Folder, manifest: Manifest) -> dict[str, Any]:
    """Return the contents of report/ by file name without ".json".

    Reports that the artifact lacks are missing from the result. Raises LlmcError E103 if one does not match its schema.
    """
    named = [n for n in manifest.files if n.startswith("report/") and n.endswith(".json")]
    return {Path(n).stem: _read(folder, manifest, n) for n in named}


def _read(folder: Folder, manifest: Manifest, name: str) -> Any:
    report = load_json(folder.read(name, manifest.files[name].bytes), name)
    kind = Path(name).stem
    _check(report, _FORMS.get(kind, object), name)
    if kind == "memory":
        for key, plan in report.items():
            if isinstance(plan, dict) and "slots" in plan:
                _check(plan, _PLAN, f"{name}.{key[:40]}")
    if kind == "eval" and report["against"] is not None:
        _check(report["against"], _AGAINST, f"{name}.against")
    return report


def _check(value: Any, form: Any, where: str) -> None:
    """Check a value against a form; raises LlmcError E103 with the path of the first mismatch."""
    if isinstance(form, Mapping):
        _check_object(value, form, where)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise damaged(where, "expected a list")
        for i, inner in enumerate(value):
            _check(inner, form[0], f"{where}[{i}]")
    elif form in (_SIGNED, _NUMBER, _COUNT):
        _check_number(value, form, where)
    elif not isinstance(value, form):
        raise damaged(where, f"expected {form.__name__}")


def _check_object(value: Any, form: Mapping[str, Any], where: str) -> None:
    """Check an object. "*" in the form stands for any key, and a key that ends in "?" may be missing."""
    required = [k for k in form if k != "*" and not k.endswith("?")]
    if not isinstance(value, dict) or not value.keys() >= set(required):
        raise damaged(where, f"expected an object of {', '.join(required) or 'any keys'}")
    for key, inner in value.items():
        if (expected := form.get(key, form.get(f"{key}?", form.get("*")))) is not None:
            _check(inner, expected, f"{where}.{key[:40]}")


def _check_number(value: Any, form: Any, where: str) -> None:
    """Check a number: finite, an integer for a count, not negative unless signed, positive for a machine's rates."""
    is_number = isinstance(value, int if form is _COUNT else (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1 << 62 or (value < 0 and form is not _SIGNED):
        expected = {_SIGNED: "a number", _NUMBER: "a number that is not negative", _COUNT: "a count"}
        raise damaged(where, f"expected {expected[form]}")
    if form is not _SIGNED and where.startswith(_PEAKS) and not value > 0:
        raise damaged(where, "expected a number above zero")


@dataclass(frozen=True)
class Opened:
    """An opened artifact. `reports` holds the contents of report/ by file name without ".json"."""

    folder: Folder
    manifest: Manifest
    programs: tuple[Program, ...]
    reports: Mapping[str, Any]

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
