"""`llmc report`: the build report as one HTML file that needs no network and no scripts.

The templates in templates/ make the page and escape every text; the other modules of this package prepare their data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import CANARY
from llmc_runtime.format.size_text import size_text

from llmc.artifact.cost_report import weight_bytes
from llmc.report.accuracy import accuracy_rows, scored_text
from llmc.report.formatting import count_noun, schedule_text, us_text
from llmc.report.kernel_choices import choices, kernel_names, kernels
from llmc.report.launch_costs import program_costs, step_sizes
from llmc.report.memory_chart import chart, memory_report
from llmc.report.module_tree import group_modules, group_name, module_facts, tree
from llmc.report.open_artifact import Opened, open_artifact


def write_report(artifact: Path, out: Path) -> str:
    """Write the report of `artifact` to `out`; return the file name and size as text.

    If `out` is empty, the file for model.llmc is model.html in the same folder. Raises LlmcError E101 to E108, E128.
    """
    page = report(open_artifact(artifact)).encode()
    out = out if out.name else artifact.parent / f"{artifact.resolve().name.removesuffix('.llmc')}.html"
    try:
        out.write_bytes(page)
    except OSError as e:
        raise LlmcError("E128", f"{out} cannot be written: {e.strerror}", "choose another file with -o") from None
    return f"{out} ({size_text(len(page))})"


def report(a: Opened) -> str:
    """Return the page."""
    predictions = a.predictions()
    part = a.manifest.source.part
    sections: dict[str, Mapping[str, Any] | None] = {  # None: the artifact does not contain the data
        "modules": _modules(a, predictions) if a.stages else None,
        "time": _time(a, predictions) if predictions else None,
        "memory": memory_report(a),
        "accuracy": _accuracy(a.reports.get("eval")),
        "passes": {"passes": a.reports["passes"]} if "passes" in a.reports else None,
        "choices": {"choices": choices(a, predictions)} if "choices" in a.reports else None,
        "kernels": {"kernels": kernels(a, predictions), "names": kernel_names(a)},
        "stages": _stages(a),
    }
    variables = {k: v for section in sections.values() for k, v in (section or {}).items()}
    return render(
        "report.html",
        **variables,
        name=f"{a.manifest.source.name}{f' ({part})' if part else ''} for {a.manifest.target.name}",
        part=part,
        facts=_facts(a),
        notes=a.reports.get("compile", {}).get("notes", ()),
        missing=[name for name, section in sections.items() if section is None],
    )


def render(template: str, **variables: Any) -> str:
    """Render a file of templates/ with these variables."""
    environment = Environment(
        loader=PackageLoader("llmc.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "group_modules": group_modules, "chart": chart, "counts": _counts, "group_name": group_name,
        "count_noun": count_noun,
        "module_facts": module_facts, "number": lambda x, form=",": format(x, form), "schedule": schedule_text,
        "size": size_text, "us": us_text,
    }  # fmt: skip
    return environment.get_template(template).render(variables)


def _counts(ops: Mapping[str, int]) -> str:
    return ", ".join(f"{n} x {op}" if n > 1 else op for op, n in sorted(ops.items()))


def _facts(a: Opened) -> list[tuple[str, str]]:
    """Return the rows of the report's first table that have a value."""
    m = a.manifest
    compiled = a.reports.get("compile", {})
    canary = "recorded" if CANARY in m.files else "not recorded (llmc verify --record)"
    facts = (
        ("compiled by", m.compiler),
        ("versions", schedule_text(compiled.get("versions", {}))),
        ("target", f"{m.target.name} ({m.target.arch}) {' '.join(m.target.features)}"),
        ("limits", ", ".join(f"{k} {v}" for k, v in vars(m.limits).items())),
        *([("ranks", f"{m.ranks}, each with these weights and this memory")] if m.ranks > 1 else []),
        ("weights", f"{m.weights.mode}, {size_text(weight_bytes(a.programs))}"),
        ("size", size_text(sum(m.sizes.values()))),
        ("vocabulary", f"{m.vocab_size:,}"),
        ("generation defaults", schedule_text(m.generation)),
        ("options", schedule_text({k: v for k, v in compiled.get("options", {}).items() if v not in (None, "")})),
        ("role", "draft model" if m.is_draft_model else ""),
        ("canary", "" if m.is_draft_model else canary),
        ("revision", m.source.revision),
        ("digest", m.digest),
    )
    return [(k, v) for k, v in facts if v]


def _accuracy(recorded: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the measures that `llmc eval` recorded; the rows are empty if it did not."""
    return {"scored": scored_text(recorded), "measures": accuracy_rows(recorded)} if recorded else {"measures": ()}


def _time(a: Opened, predictions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the predicted costs of the programs, and the machine that they are predicted for."""
    return {"machine": predictions["machine"], "costs": program_costs(a.programs, predictions)}


def _modules(a: Opened, predictions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of modules, with the launches of one decode program and one prefill program as columns."""
    predicted = predictions.get("programs", {})
    columns = [name for name in (_decode(a), _prefill(a, predicted)) if name in predicted]
    root = tree(a.text(next(iter(a.stages.values()))), {c: predicted[c]["launches"] for c in columns})
    at = "; ".join(f"{c} at {step_sizes(predicted[c]['sizes'])}" for c in columns)
    return {"tree": root, "columns": columns, "columns_at": at}


def _decode(a: Opened) -> str:
    return next((p.name for p in a.programs if p.uniform and not p.role), "")


def _prefill(a: Opened, predicted: Mapping[str, Any]) -> str:
    """Return the first program that can run a prompt of 512 tokens, or else the one with the largest token limit."""
    steps = [p for p in a.programs if not p.uniform and not p.role and p.name in predicted]
    fits = (p.name for p in steps if p.serves.get("T", (1, 1))[1] >= 512)
    return next(fits, steps[-1].name if steps else "")


def _stages(a: Opened) -> dict[str, Any]:
    """Return the stage files, and the last stage of the narrowest program in full."""
    rows = [(name, file, a.manifest.files[file].bytes) for name, file in a.stages.items()]
    name, text = _decode(a) or next((p.name for p in a.programs), ""), ""
    if rows and name:
        whole = a.text(rows[-1][1])
        begin = whole.find(f"graph @{name}(")
        end = whole.find("\n}", begin)
        text = whole[begin : end + 2] if begin >= 0 < end else ""
    return {"stages": rows, "graph_name": name, "graph_text": text}
