"""The build report: one self-contained, complete page that escapes all texts of the artifact."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from artifact import tiny
from llmc_runtime.format.program import Program
from markupsafe import escape
from report.conftest import Made

from llmc.artifact.write import write_artifact
from llmc.cli import main
from llmc.passes.pass_report import pattern
from llmc.report.formatting import count_noun, count_text, runs, us_text
from llmc.report.html_report import render, write_report
from llmc.report.memory_chart import chart
from llmc.report.module_tree import group_modules, group_name, tree
from llmc.targets.cpu_targets import portable

VOID = {"meta", "br"}
NASTY = "</pre></title><script>alert(1)</script><img src=x onerror='alert(2)'>"


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order; keeps tags, attributes, ids and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.said: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.said).split())


def alone(page: Page) -> None:
    """Nothing is fetched, nothing runs, and every link leads to a place in the page."""
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    ids = [v for k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "srcset", "action", "data")
        assert name != "href" or (value or "").removeprefix("#") in ids
    assert ("http-equiv", "Content-Security-Policy") in page.attributes


def test_a_compile_writes_its_report(made: Made) -> None:
    text = made.page.read_text()
    page = Page(text)
    alone(page)
    assert "url(" not in text and "@import" not in text and "http:" not in text and "https:" not in text
    programs = [Program.load(p.read_bytes(), p.name) for p in (made.artifact / "programs").iterdir()]
    rows = re.findall(r"^ *\d+ +[\d.]+ +[\d.]+ +(?:memory|compute|launch) ", text, re.M)
    assert len(rows) == sum(len(p.launches) for p in programs)  # each of them, with its time and what bounds it
    sources = [p for p in (made.artifact / "kernels").iterdir() if p.suffix == ".cpp"]
    assert all(escape(p.read_text().rstrip("\n")) in text for p in sources)
    assert page.tags["svg"] == len(programs)
    words = page.words
    for expected in ("rms-norm", "model.layers.*.input_layernorm", "self_attn", "cost rule", "torch=", "KV cache"):
        assert expected in words, expected
    assert "more nodes than before" in words


def test_kernels_have_names_and_come_by_their_time(made: Made) -> None:
    text = made.page.read_text()
    kernels = re.findall(r'<span id="k-(\w+)">([^<]*) <code class=dim>(\w{4})</code> <span class=dim>([^<]*)', text)
    assert len(kernels) == len(set(kernels)) > 10
    assert all(hash_[:4] == shown for hash_, _, shown, _ in kernels)
    assert {"cpu/rows rms_norm", "cpu/attention paged_attention"} <= {name for _, name, _, _ in kernels}
    scale = {"us": 1.0, "ms": 1e3, "s": 1e6}
    times = [float(m[1]) * scale[m[2]] for *_, where in kernels if (m := re.match(r"([\d.]+) (\w+) in all", where))]
    assert times == sorted(times, reverse=True) and len(times) >= len(kernels) - 1  # all but the step unit
    links = re.findall(r'<a href="#k-(\w+)">([^<]*) <code', text)
    assert links and set(links) <= {(hash_, name) for hash_, name, _, _ in kernels}


def test_colours_are_explained_and_headings_are_not_under_the_bar(made: Made) -> None:
    text = made.page.read_text()
    assert "scroll-margin-top" in text and 'key hot"></span>bound by the overhead' in text


def test_the_reports_of_a_compile_say_what_passes_did(made: Made) -> None:
    record = json.loads((made.artifact / "report/passes.json").read_text())
    stages = [p.stem.partition("-")[2] for p in sorted((made.artifact / "ir").glob("*.llir"))][1:]
    assert [r["pass"].partition("{")[0] for r in record] == stages
    norm = next(r for r in record if r["pass"] == "fuse-norm")
    layers = {r["loc"]: r["count"] for r in norm["applied"] if r["rule"] == "rms-norm"}
    text = next((made.artifact / "ir").glob("*-fuse-norm.llir")).read_text()
    assert sum(layers.values()) == text.count("= rms_norm(") == norm["changes"]
    assert layers["model.norm"] == 1 and layers["model.layers.*.input_layernorm"] == 2
    choices = json.loads((made.artifact / "report/choices.json").read_text())
    launched = sum(len(json.loads(p.read_text())["launches"]) for p in (made.artifact / "programs").iterdir())
    assert sum(c["count"] for c in choices) >= launched
    assert all(c["ways"] > len(c["others"]) and (not c["others"] or c["others"][0]["us"] >= c["us"]) for c in choices)


def test_near_misses_are_reported_with_their_reason(made: Made, tmp_path: Path) -> None:
    """A norm with a second reader is not fused, and the report has the reason."""
    from llmc.extension import load
    from llmc.ir.text import parse
    from llmc.passes.base import Ctx
    from llmc.passes.pass_report import Record
    from llmc.passes.pipeline import parse_pipeline, run_pipeline

    text = (Path(__file__).parents[1] / "passes/fuse_norm.llir").read_text()
    registry = load()
    module = parse(text, registry.opset())
    ctx = Ctx(registry.opset())
    record = Record(module, ctx)
    passes = parse_pipeline("fuse-norm, dce", registry.passes)
    run_pipeline(module, passes, ctx, lambda i, p, n, s, m: record.observe(p, n, m))
    first, second = record.data
    assert first["missed"] and not second["missed"]
    assert {r["why"] for r in first["missed"]} == {p.why for p in ctx.misses}
    words = Page(render("passes.html", passes=record.data)).words
    assert "nearly matched" in words and all(r["why"] in words for r in first["missed"])


def test_no_text_of_the_artifact_is_html(tmp_path: Path) -> None:
    parts = tiny.parts(tmp_path)
    launch = replace(parts.programs[0].launches[0], loc=NASTY, op=NASTY)
    programs = (replace(parts.programs[0], launches=(launch,)), *parts.programs[1:])
    kernel = replace(parts.kernels[0], source=parts.kernels[0].source + NASTY, entry=NASTY)
    rule = {"rule": NASTY, "op": NASTY, "loc": NASTY, "count": 1, "first": NASTY}
    way = {"kernel": NASTY, "schedule": {NASTY: 1}, "us": 1.0, "measured": True}
    node = {"graph": "decode", "node": NASTY, "loc": NASTY, "count": 1, "ways": 3, "sizes": {"R": 1, "T": 1, "P": 1}}
    slot = {"name": NASTY, "type": NASTY, "offset": 0, "nbytes": 8, "first": 0, "last": 1, "loc": NASTY}
    reports = {
        "passes.json": [{"pass": NASTY, "changes": 1, "graphs": 1, "nodes": 1, "applied": [rule],
                         "missed": [{**rule, "why": NASTY}], "made": [], "gone": []}],
        "choices.json": [  # older compilers wrote no refusals
            {**node, **way, "others": [way, way]}, {**node, **way, "others": [], "refused": {NASTY: NASTY}},
        ],
        "compile.json": {"notes": [NASTY], "options": {NASTY: NASTY}, "versions": {NASTY: NASTY}},
        "memory.json": {"decode": {"arena_bytes": 8, "values": 1, "slots": [slot]}},
    }  # fmt: skip
    ir = (
        (
            "traced",
            f"graph @main(%a.w: weight f32[2]) {{\n  %0 = neg(%a.w) : f32[2]  // {NASTY.replace(' ', '')}\n}}\n",
        ),
    )
    parts = replace(
        parts, machine=portable(), programs=programs, kernels=(kernel, *parts.kernels[1:]), reports=reports, ir=ir,
        source=replace(parts.source, name=NASTY),
    )  # fmt: skip
    write_artifact(tmp_path / "toy.llmc", parts)
    assert main(["report", str(tmp_path / "toy.llmc"), "-o", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    page = Page(text)
    alone(page)
    assert text.count("&lt;script&gt;") > 20 and page.tags["svg"] == 1


def test_an_artifact_without_records_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For artifacts of older or other compilers, the page lists the missing parts."""
    write_artifact(tmp_path / "toy.llmc", replace(tiny.parts(tmp_path), reports={}, ir=()))
    assert "KiB" in write_report(tmp_path / "toy.llmc", tmp_path / "x.html")
    page = Page((tmp_path / "x.html").read_text())
    alone(page)
    assert "does not contain this data" in page.words
    assert main(["report", str(tmp_path / "toy.llmc"), "-o", str(tmp_path / "no/x.html")]) == 1
    assert "LLMC-E128" in capsys.readouterr().err
    (tmp_path / "toy.llmc/programs/step.json").write_text("{}")
    assert main(["report", str(tmp_path / "toy.llmc")]) == 1 and "LLMC-E106" in capsys.readouterr().err


def test_layers_that_are_alike_are_one() -> None:
    lines = [f"    %m.layers.{i}.w: weight f32[{8 if i == 3 else 4}, 2]," for i in range(6)]
    nodes = [f"  %{i} = linear(%x, %m.layers.{i}.w) : f32[T, 4]  // m.layers.{i}" for i in range(6)]
    launches = [{"loc": f"m.layers.{i}", "us": 2.0} for i in range(6)]
    root = tree("\n".join(["graph @main(", *lines, *nodes]), {"step": launches})
    groups = group_modules(root.at("m.layers").parts.values())
    assert [[p.name for p in g] for g in groups] == [["0", "1", "2", "4", "5"], ["3"]]
    assert [group_name(g) for g in groups] == ["0-2, 4-5 (5 equal modules)", "3"]
    assert root.params() == 5 * 8 + 16 and root.total("step") == (6, 12.0)
    assert root.at("m.layers.0").ops == {"linear": 1}


def test_the_chart_draws_every_value_inside_the_arena() -> None:
    slots = [
        {
            "name": f"v{i}",
            "type": "f32[4]",
            "offset": 256 * (i % 3),
            "nbytes": 256,
            "first": i,
            "last": i + 2,
            "loc": "a",
        }
        for i in range(9)
    ]
    text = render("memory_chart.html", **chart(slots, 768))
    page = Page(text)
    boxes = re.findall(r'y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', text)
    assert page.tags["rect"] == page.tags["title"] == len(boxes) == 9
    assert all(0 <= float(y) and float(y) + float(h) <= 260.2 for y, _, h in boxes)


@pytest.mark.parametrize(
    ("numbers", "words"), [([0, 1, 2, 5], "0-2, 5"), ([3], "3"), ([0, 2, 4, 6], "0, 2, ..., 6"), ([2, 1, 2], "1-2")]
)
def test_numbers_are_reported_in_few_words(numbers: list[int], words: str) -> None:
    assert runs(numbers) == words


def test_amounts() -> None:
    assert count_noun(1, "launch", "launches") == "1 launch" and count_noun(2000, "change") == "2,000 changes"
    assert count_text(999) == "999" and count_text(8_030_000_000) == "8.03 G" and us_text(1500) == "1.50 ms"
    assert (
        pattern("model.layers.31.mlp") == "model.layers.*.mlp" and pattern("h.0") == "h.*" and pattern("a1.b") == "a1.b"
    )
