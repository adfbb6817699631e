"""The GPU benches' own arithmetic, without a GPU: floors against the known table, rows, the plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from llmc_runtime.format.program import Launch, Program

from bench import shapes
from bench.gpu import account, experts, floors, in_step, products, speculation
from bench.gpu.engine import CONTEXTS, LEAST, Step, decode_steps
from bench.gpu.kernels import STEPS, Load, groups
from bench.gpu.nvml import Sample
from bench.gpu.plan import parser, plan_of
from bench.gpu.plot import svg
from bench.gpu.rows import Row, Rows, engine_row, read, tables
from llmc.codegen.backends.cuda.fragment_product import PACKED
from llmc.codegen.backends.cuda.gemm_tiles import GEMM_TILES
from llmc.codegen.backends.cuda.gemm_wgmma import GEMM_WGMMA
from llmc.codegen.tuning_records import Record
from llmc.codegen.tuning_records import read as read_records
from llmc.extension import load
from llmc.ir.graph import Builder, Graph, Module
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.measure.timing import Sustained, Trial
from llmc.targets.gpu_targets import sm_90

# ms at context 192 for batches 1, 8, 16, 32, 64, 128, 256; prefill ms at 512, 2048, 8192; offline tokens a second.
TABLE = (
    (shapes.LLAMA31_8B, (3.23, 3.27, 3.31, 3.40, 3.57, 3.92, 6.22), (9.30, 37.57, 166.19), 13800),
    (shapes.LLAMA32_1B, (0.533, 0.542, 0.553, 0.575, 0.618, 0.705, 1.14), (1.39, 5.47, 25.70), 79400),
    (shapes.QWEN3_06B, (0.261, 0.294, 0.332, 0.408, 0.559, 0.862, 1.60), (0.672, 2.94, 18.82), 50900),
)
BATCHES = (1, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize(("shape", "decode", "prefill", "offline"), TABLE, ids=[t[0].name for t in TABLE])
def test_floors_are_those_of_the_reference(
    shape: shapes.Shape, decode: tuple[float, ...], prefill: tuple[float, ...], offline: float
) -> None:
    ours = [floors.decode_seconds(shape, b, 192) * 1e3 for b in BATCHES]
    assert ours == pytest.approx(decode, rel=5e-3)
    assert [floors.prefill_seconds(shape, t) * 1e3 for t in (512, 2048, 8192)] == pytest.approx(prefill, rel=5e-3)
    assert floors.offline_tokens_per_second(shape) == pytest.approx(offline, rel=5e-3)


def test_the_cost_of_attention_is_given_by_what_its_queries_see() -> None:
    streams = 64 * (1000 + STEPS)
    load = Load(64, 1000, 512)  # 448 tokens of a prompt behind two such parts
    assert load.attended("paged_attention_single", True) == (streams, streams)
    pairs, tokens = load.attended("paged_attention", True)
    assert tokens == 3 * 448 and 2 * 448 * 448 < pairs < 3 * 448 * 448
    assert load.attended("paged_attention", False) == (streams + pairs, streams + tokens)
    assert Load(32).attended("paged_attention", False) == (32 * (128 + STEPS),) * 2
    assert (Load(32).name, Load(32, temperature=0.5).name) == ("b32", "b32 at temperature 0.5")


def decode(batch: int, measured: float, floor: float | None = 3.23) -> Row:
    return engine_row("decode", "llama-3.1-8b", str(batch), "ms", measured, floor)


def test_a_row_knows_its_peer_its_goals_and_whether_they_are_met() -> None:
    assert [decode(1, ms).verdict for ms in (3.4, 3.8, 4.29)] == ["aim", "gate", "missed by 10%"]
    row = decode(1, 3.8)
    assert (row.peer, row.gate, row.aim) == (4.972, 3.9, 3.5)
    assert row.share == pytest.approx(0.85) and row.peer_share == pytest.approx(3.23 / 4.972)
    assert decode(16, 5.0).gate is None and decode(16, 5.0).verdict == "" and decode(64, 5.0).peer == 5.91


def test_long_contexts_have_goals_and_a_suite_of_their_own() -> None:
    rows = [engine_row("contexts", "llama-3.1-8b", f"{b} after {n}", "ms", 8.55, 7.0) for b, n in CONTEXTS]
    assert [row.verdict for row in rows] == ["gate", "missed by 1%", "gate"]
    assert "Decode after long prompts" in tables(rows)
    assert "contexts" not in plan_of(parser().parse_args([])).suites
    assert plan_of(parser().parse_args(["--suites", "contexts"])).suites == ("contexts",)


def test_a_rate_meets_its_goals_from_above() -> None:
    found = [
        engine_row("offline", "llama-3.1-8b-int4", "512 of 512 in, 256 out", "tok/s", v, None)
        for v in (9459, 11000, 13000)
    ]
    assert [row.verdict for row in found] == ["missed by 14%", "gate", "aim"]


def test_throughput_is_better_if_larger_and_compared_only_under_equal_load() -> None:
    row = engine_row("offline", "qwen3-0.6b", "512 of 512 in, 256 out", "tok/s", 40000, 50900)
    assert row.share == pytest.approx(40000 / 50900) and row.peer == 30704
    assert engine_row("offline", "qwen3-0.6b", "64 of 512 in, 256 out", "tok/s", 9000, 50900).peer is None


def test_rows_survive_a_kill_and_the_last_of_equals_holds(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    for ms in (3.9, 3.8):
        rows.add(decode(1, ms))
    rows.add(decode(8, 4.0))
    with rows.path.open("a") as f:
        f.write('{"suite": "decode", "mod')
    found = read(rows.path)
    assert [(r.case, r.measured) for r in found] == [("1", 3.8), ("8", 4.0)]
    text = tables(found)
    assert "| llama-3.1-8b | 1 | 3.800 | 3.230 | 85% | 4.972 | 65% | 3.900 | 3.500 | gate |" in text


def test_the_plot_has_both_lines_and_wants_measured_rows() -> None:
    picture = svg([decode(1, 3.8), decode(8, 4.1), decode(64, 4.5)])
    root = ElementTree.fromstring(picture)
    assert len(root.findall("{*}polyline")) == 2 and len(root.findall("{*}circle")) == 6
    with pytest.raises(ValueError, match="no decode row"):
        svg([])


def test_the_run_says_what_it_does_not_know() -> None:
    assert [s.name for s in plan_of(parser().parse_args([])).models][-1] == "llama-3.1-8b"
    for bad in (["--models", "gpt"], ["--suites", "decode,nonsense"]):
        with pytest.raises(ValueError, match="is not known; there are"):
            plan_of(parser().parse_args(bad))


def test_decode_steps_are_measured_between_steps_in_which_every_row_decodes() -> None:
    prompts = [Step(2, 400, 100), Step(4, 202, 5_000_000)]
    steps = [Step(4, 4, 7_000_000 + 2_000_000 * i) for i in range(LEAST + 1)]
    assert decode_steps([*prompts, *steps, Step(2, 2, 999_000_000)], 4) == [2.0] * LEAST
    with pytest.raises(AssertionError, match=f"{LEAST} of {LEAST + 1} steps"):
        decode_steps([prompts[0], *steps[:LEAST]], 4)


def test_an_account_counts_overlapping_kernels_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [account.Kernel("a", 0, 1000, 1), account.Kernel("b", 900, 1000, 1)]
    steps = [first, [k._replace(begin=k.begin + 9000, call=2) for k in first]]
    alone = account.Kernel("c", 5000, 10, 3)
    account.save(tmp_path / "k.json", [*first, alone, *steps[1]])
    assert account.steps_of(account.load(tmp_path / "k.json")) == steps
    assert account.table(steps, ["x", "y"]) == [("x", 1, 1.0, 1.0), ("y", 1, 0.9, 1.0)]
    launches = tuple(Launch("k", e, (), (), loc=f"model.layers.3.{e}", op="linear") for e in "ab")
    assert account.places([Program("p", {}, {}, (), launches, 0)], first) == [
        "linear model.layers.a",
        "linear model.layers.b",
    ]
    assert account.places([Program("p", {}, {}, (), launches[:1], 0)], first) == ["a", "b"]
    account.main([str(tmp_path / "k.json")])
    assert "1 steps of 2 kernels" in capsys.readouterr().out


def test_launches_of_one_kernel_in_equal_places_are_a_group() -> None:
    def launch(kernel: str, loc: str) -> Launch:
        return Launch(kernel=kernel, entry="e", args=(), sizes=(), loc=loc)

    program = Program("p", {}, {}, (), tuple(launch(k, f"model.layers.{i}.mlp") for i in range(3) for k in "ab"), 0)
    assert {k: len(v) for k, v in groups(program).items()} == {
        ("a", "model.layers.mlp"): 3,
        ("b", "model.layers.mlp"): 3,
    }


def ways(times: dict[str, float], node: str = "linear(bf16[R, 64], bf16[96, 64]) -> bf16[R, 96]") -> list[Record]:
    return [Record("cuda+sm_90", node, (("R", 8),), "triton/gemm_small", way, us) for way, us in times.items()]


def test_each_way_in_turn_is_made_the_best() -> None:
    records = [*ways({"a": 3.0, "b": 2.0, "c": 5.0}), *ways({"d": 1.0}, "exp(f32[R]) -> f32[R]")]
    for k, best in enumerate(["b", "a", "c"]):
        made = in_step.promoted(records, k)
        assert min(made[:3], key=lambda r: r.us).schedule == best and made[3] == records[3]
    assert in_step.promoted(records, 3) == records


def test_times_inside_the_step_are_those_of_the_best_and_the_rest_of_the_step() -> None:
    records = ways({"a": 3.0, "b": 2.0, "c": 5.0})
    ranked = in_step.ranked(records)
    (key,) = ranked
    group = in_step.Group(key, (4, 9, 14, 19))
    found = in_step.adjusted(group, {0: 108.0, 1: 100.0, 2: 104.0}, ranked)
    assert {r.schedule: r.us for r in found} == {"b": 4.0, "a": 2.0, "c": 3.0}
    assert in_step.adjusted(group, {0: 108.0, 3: 100.0}, ranked) == [replace(records[1], us=4.0)]


def test_launches_of_one_place_are_distinguished_by_their_nodes() -> None:
    """Output and down products of a layer have one op and one place."""
    m = Module(symbols={"R": (1, 8)})
    g = m.graphs["decode"] = Graph("decode")
    b = Builder(g, OPS, loc="model.layers.0")
    x = g.input("x", tensor("bf16", "R", 64))
    for n in (96, 64):
        x = b.linear(x, g.input(f"w{n}", tensor("bf16", n, int(x.type.shape[-1])), weight=True))
    g.outputs = [x]
    launches = [SimpleNamespace(op=n.op.name, loc=n.loc) for n in g.nodes]
    first, second = in_step.groups(m, g, SimpleNamespace(launches=launches))  # type: ignore[arg-type]
    assert (first.places, second.places) == ((0,), (1,))
    assert "bf16[96, 64]" in first.key[0] and "bf16[64, 96]" in second.key[0]


def test_launches_over_packed_codes_are_found_by_the_node_that_was_measured() -> None:
    m = Module(symbols={"R": (1, 8)})
    g = m.graphs["decode"] = Graph("decode")
    b = Builder(g, OPS, loc="model.layers.0")
    x, code = g.input("x", tensor("bf16", "R", 64)), g.input("code", tensor("u8", 96, 64), weight=True)
    scale = g.input("scale", tensor("bf16", 96, 2), weight=True)
    g.outputs = [b.quantized_linear(x, code, scale, block=(1, 32), zero_point=8, bits=4)]
    launches = [SimpleNamespace(op="rms_norm", loc="model"), SimpleNamespace(op=PACKED, loc="model.layers.0")]
    (found,) = in_step.groups(m, g, SimpleNamespace(launches=launches))  # type: ignore[arg-type]
    assert found.places == (1,) and found.key[0].startswith("quantized_linear(")


@pytest.mark.parametrize("text", ["264x520", "264x520:residual", "264x520:gated"])
def test_the_ways_to_multiply_are_triton_s_best_and_all_of_cuda(text: str) -> None:
    product, registry = products.Product.read(text), load()
    found = products.candidates(product, 512, 3, registry, sm_90())
    node = product.node(registry)[1]
    ours = [*GEMM_WGMMA.schedules(node, sm_90()), *GEMM_TILES.schedules(node, sm_90())]
    assert [c.kernel.name in products.OURS for c in found] == [False] * 3 + [True] * len(ours)
    assert all(c.env == {"T": 512} for c in found) and product.name == text
    assert product.rows == (528 if text.endswith("gated") else 264)


def test_sustained_times_of_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In two rounds in opposite order, with the clock and the power of the second half of each."""
    product, seen = products.Product(264, 520), []
    found = products.candidates(product, 512, 3, load(), sm_90())

    class Timer:
        def sustained(self, trials: list[Trial], bounds: object, seconds: float) -> list[Sustained]:
            seen.append([str(c.schedule) for c in trials])
            return [Sustained(10.0 * i + len(seen), 100 * i, 100 * i + 50) for i, _ in enumerate(trials)]

    class Sampler:
        samples = (Sample(120, 0, 1500, 700_000, 0), Sample(140, 0, 1600, 690_000, 0), Sample(170, 0, 1, 1, 0))

        def __enter__(self) -> Sampler:
            return self

        def __exit__(self, *exception: object) -> None: ...

    monkeypatch.setattr(products, "Sampler", Sampler)
    times = [float(len(found) - i) for i, _ in enumerate(found)]
    args = SimpleNamespace(sustained=0.1, best=2)
    rows = products.report_sustained(Timer(), product, 512, found, times, args, {"T": (1, 8192)})
    fastest = [str(found[-1].schedule), str(found[-2].schedule)]
    assert seen == [fastest, fastest[::-1]]
    assert [r["us"] for r in rows] == [6.5, 6.5]
    assert rows[1]["rounds"] == [{"us": 11.0, "mhz": 1550, "watts": 695}, {"us": 2.0, "mhz": 0, "watts": 0}]
    assert "sustained       6.5 us (1.0 us at 0 MHz, 0 W, 12.0 us at 1550 MHz, 695 W)" in capsys.readouterr().out


def test_a_report_of_products(capsys: pytest.CaptureFixture[str]) -> None:
    product = products.Product(264, 520)
    ways = [("triton/gemm", 2.0), ("cuda/gemm_wgmma", 4.0), ("cuda/gemm_wgmma", 5.0), ("cublas", 8.0)]
    rows = [products.row(product, 512, kernel, "{}", us) for kernel, us in ways]
    assert rows[0]["tflops"] == round(2e-6 * 512 * 264 * 520 / 2, 1)
    products.report(product, 512, rows)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "512 tokens x 264x520: Triton 2.0 us, cuda/gemm_wgmma 4.0 us, cublas 8.0 us"
    assert len(rest) == 4 and "2.0 us" in rest[0] and "triton/gemm" in rest[0]


@pytest.mark.parametrize(("tokens", "symbols"), [(1, [""]), (64, ["T", "R"]), (512, ["T"])])
def test_experts_are_timed_and_recorded_for_rows_and_tokens(tokens: int, symbols: list[str], tmp_path: Path) -> None:
    m, registry, path = experts.MIXTURES["qwen3-30b-a3b"], load(), tmp_path / "tuning.jsonl"
    assert experts.ops_of(tokens)[2:] == (experts.GATHERED if tokens == 1 else ())
    for op in experts.ops_of(tokens)[2:]:  # they have no CUDA kernel
        ways = experts.candidates(m, op, tokens, 3, registry, sm_90())
        assert [c.kernel.name for c in ways] == [f"triton/{op.removeprefix('norm_')}"] * 3
    for op in ("moe_up", "moe_down"):
        found = experts.candidates(m, op, tokens, 3, registry, sm_90())
        assert [c.kernel.name == experts.OURS for c in found] == [False] * 3 + [True] * 10
        experts.store(path, m, op, tokens, [(c, 2.0) for c in found], registry, sm_90())
    records = read_records(path)
    assert len(records) == 2 * 13 * len(symbols)
    assert {r.sizes for r in records} == {((s, tokens),) if s else () for s in symbols}
    row = experts.row(m, "moe_up", tokens, found[0], 2.0)
    assert row["floor_us"] == round(m.floor_us("moe_up", tokens), 2) and m.touched(tokens) <= min(128, 8 * tokens)


@pytest.mark.slow(seconds=40)
def test_the_bench_of_speculation_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU with a small model: every method and fixed number of drafts, at about the requested rates."""
    monkeypatch.setattr(speculation, "FIXED", (1, 3))
    monkeypatch.setattr(speculation, "WARM", 8)
    plan = ["--model", "small", "--target", "cpu:native", "--batches", "4", "--threads", "1"]
    assert speculation.main([*plan, "--artifacts", str(tmp_path / "artifacts"), "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {(x["method"], x["drafts"]) for x in rows} == {
        (method, drafts)
        for method, some in (("plain", ["chosen"]), *((m.name, ["chosen", "1", "3"]) for m in speculation.METHODS))
        for drafts in some
    }
    rates = {m.name: m.rate for m in speculation.METHODS}
    for x in rows:
        assert x["drafts"] == "chosen" or abs(x["rate"] - rates[x["method"]]) < 0.12, x
    assert "draft model, rate 0.8" in (tmp_path / "out" / "tables.md").read_text()
    both = [*plan, "--methods", "suffix,eagle", "--nothing", "too", "--rounds", "1", "--out", str(tmp_path / "both")]
    assert speculation.main([*both, "--artifacts", str(tmp_path / "artifacts")]) == 0
    rows = json.loads((tmp_path / "both" / "results.json").read_text())["rows"]
    assert {(x["method"], x["drafts"]) for x in rows} == {
        *(("plain", drafts) for drafts in ("chosen", "nothing")), ("suffix matching", "nothing"),
        *(("EAGLE-3 head", drafts) for drafts in ("chosen", "1", "3", "nothing")),
    }  # fmt: skip
    assert all(x["rate"] < 0.1 for x in rows if x["drafts"] == "nothing")
    assert (tmp_path / "both" / "tables.md").read_text().count("| EAGLE-3 head") == 2
