"""`llmc report`: the build report as one HTML file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError

from llmc.artifact.inspect import size_text
from llmc.report import kernel_tab, memory_tab, module_tab, pass_tab, timing_tab
from llmc.report.formatting import schedule_text
from llmc.report.html import POLICY, STYLE, Html, code, fold, join, number, table, tag
from llmc.report.open_artifact import Opened, open_to_look

PARTS = (
    ("modules", "Modules"), ("time", "Time"), ("memory", "Memory"), ("passes", "Passes"), ("choices", "Choices"),
    ("kernels", "Kernels"), ("ir", "Stages"),
)  # fmt: skip
OLD = "This artifact was compiled before this was recorded; compile it again to see it."


def write_report(artifact: Path, out: Path) -> str:
    """Write the report of `artifact` to `out`; return the file name and size as text.

    If `out` is empty, model.llmc gives model.html beside it. Raises LlmcError E101 to E108, E128.
    """
    page = report(open_to_look(artifact)).encode()
    out = out if out.name else artifact.parent / f"{artifact.resolve().name.removesuffix('.llmc')}.html"
    try:
        out.write_bytes(page)
    except OSError as e:
        raise LlmcError("E128", f"{out} cannot be written: {e.strerror}", "name another file with -o") from None
    return f"{out} ({size_text(len(page))})"


def report(a: Opened) -> str:
    """Return the page."""
    predictions = a.predictions()
    part = a.manifest.source.part
    title = f"{a.manifest.source.name}{f' ({part})' if part else ''} for {a.manifest.target.name}"
    sections = {
        "modules": _modules(a, predictions),
        "time": timing_tab.section(a.programs, predictions, kernel_tab.link) if predictions else tag("p", OLD),
        "memory": memory_tab.section(a),
        "passes": pass_tab.section(a.reports["passes"]) if "passes" in a.reports else tag("p", OLD),
        "choices": kernel_tab.choices(a, predictions) if "choices" in a.reports else tag("p", OLD),
        "kernels": kernel_tab.section(a, predictions),
        "ir": _stages(a),
    }
    nav = tag("nav", *(tag("a", name, href=f"#{key}") for key, name in PARTS))
    body = [join([tag("h2", name, id=key), sections[key]]) for key, name in PARTS]
    head = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"{tag('title', title)}<style>{STYLE}</style></head>"
    )
    return f"{head}\n{tag('body', join([tag('h1', title), nav, *_warning(part), _facts(a), *body]))}</html>\n"


def _warning(part: str) -> list[Html]:
    text = f"A quick build: {part} of the model alone. What it writes, and its time and memory, are not the model's."
    return [tag("p", text, class_="warn")] if part else []


def _facts(a: Opened) -> Html:
    m = a.manifest
    told = a.reports.get("compile", {})
    limits = ", ".join(f"{k} {v}" for k, v in vars(m.limits).items())
    size = sum(i.bytes for i in m.files.values()) + sum(w.bytes for w in m.weights.files)
    rows: list[tuple[Any, Any]] = [
        ("compiled by", m.compiler),
        ("versions", schedule_text(told.get("versions", {}))),
        ("target", f"{m.target.name} ({m.target.arch}) {' '.join(m.target.features)}"),
        ("limits", limits),
        ("weights", f"{m.weights.mode}, {size_text(memory_tab.weight_bytes(a))}"),
        ("size", size_text(size)),
        ("vocabulary", number(m.vocab_size)),
        ("generation defaults", schedule_text(m.generation)),
        ("options", schedule_text({k: v for k, v in told.get("options", {}).items() if v not in (None, "")})),
        ("canary", "recorded" if "canary.json" in m.files else "not recorded (llmc verify --record)"),
        ("revision", m.source.revision),
        ("digest", code(m.digest)),
    ]
    notes = [tag("p", note) for note in told.get("notes", ())]
    return join([table(("", ""), ((k, str(v) if not isinstance(v, Html) else v) for k, v in rows if v)), *notes])


def _modules(a: Opened, predictions: Mapping[str, Any]) -> Html:
    stages = a.stages
    if not stages:
        return tag("p", OLD)
    told = predictions.get("programs", {})
    columns = [name for name in (_decode(a), _prefill(a, told)) if name in told]
    root = module_tab.tree(a.text(next(iter(stages.values()))), {c: told[c]["launches"] for c in columns})
    at = "; ".join(f"{c} at {', '.join(f'{s}={n}' for s, n in told[c]['sizes'].items() if s != 'P')}" for c in columns)
    text = "As the model's own code names them, with the weights of the checkpoint and the ops that were traced. "
    return join(
        [tag("p", text + (f"Launches and predicted time: {at}." if at else "")), module_tab.section(root, columns)]
    )


def _decode(a: Opened) -> str:
    return next((p.name for p in a.programs if p.uniform), "")


def _prefill(a: Opened, told: Mapping[str, Any]) -> str:
    """The program that runs a prompt of 512 tokens, or else the one for the most tokens."""
    steps = [p for p in a.programs if not p.uniform and p.name in told]
    fits = (p.name for p in steps if p.serves.get("T", (1, 1))[1] >= 512)
    return next(fits, steps[-1].name if steps else "")


def _stages(a: Opened) -> Html:
    """A table of the stage files, and the last stage of the narrowest program in full."""
    files = a.manifest.files
    rows = [(code(name), code(file), number(files[file].bytes)) for name, file in a.stages.items()]
    text = tag(
        "p", "The module after every pass, as text that `llmc opt` reads and `llmc diff ARTIFACT:STAGE` compares."
    )
    shown = _graph_text(a)
    return join([text, table(("stage", "file", "bytes"), rows), shown])


def _graph_text(a: Opened) -> Html:
    name = _decode(a) or next((p.name for p in a.programs), "")
    if not a.stages or not name:
        return Html("")
    whole = a.text(list(a.stages.values())[-1])
    begin = whole.find(f"graph @{name}(")
    end = whole.find("\n}", begin)
    return fold(f"the last stage of {name}", tag("pre", whole[begin : end + 2])) if begin >= 0 < end else Html("")
