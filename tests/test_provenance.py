"""Which extensions a compile depends on: only those may change its key in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmc.codegen.kernel import Kernel
from llmc.extension import Extension, Registry, combine, load
from llmc.ir.graph import Module, Node
from llmc.ir.opdef import op
from llmc.passes.base import Ctx, Pass
from llmc.provenance import idle_passes, related_extensions, used_extensions
from llmc.reuse import Reuse

THERE = f"{__name__}:"


@dataclass(frozen=True)
class Mine(Pass):
    """Do nothing."""

    name: ClassVar[str] = "mine"

    def run(self, m: Module, ctx: Ctx) -> int:
        return 0


@op("(x: f[n]) -> x[n]")
def my_op(x: Any) -> Any:
    """The operand."""
    return x


class Any_(Kernel):
    """A kernel that claims other nodes than those of its ops."""

    def claims(self, node: Node) -> bool:
        return True


OF_MINE = Kernel("mine/op", ("my_op",))
OF_OURS = Kernel("mine/norm", ("rms_norm",))
FOR_GPUS = Kernel("mine/gpu", ("rms_norm",), "triton")
CLAIMS = Any_("mine/claims", ("my_op",))
PASS = {"mine": THERE + "Mine"}
OP = {"my_op": THERE + "my_op"}


def related(config: dict[str, Any] | None = None, text: str = "serve", **parts: Any) -> bool:
    registry = combine([*load().extensions, Extension("mine", **parts)])
    target = load().target("cpu:portable")
    return related_extensions(registry, target, text, config or {}) == {"mine"}


def test_an_extension_that_a_compile_cannot_use_does_not_matter() -> None:
    assert not related(passes=PASS, ops=OP, kernels={"mine/op": THERE + "OF_MINE"})
    assert not related(kernels={"mine/gpu": THERE + "FOR_GPUS"})
    assert not related(targets={"cpu:mine": THERE + "x"}, schemes={"mine": THERE + "x"}, pipelines={"short": "cse"})
    assert not related(toolchains={"mine": THERE + "x"})


def test_the_key_covers_everything_that_changes_the_artifact() -> None:
    text = "serve, after fuse-norm: mine"
    assert related(text=text, passes=PASS)
    assert related(text=text, passes=PASS, ops=OP, kernels={"mine/op": THERE + "OF_MINE"})
    assert related(kernels={"mine/norm": THERE + "OF_OURS"})
    assert related(kernels={"mine/claims": THERE + "CLAIMS"})
    assert related({"quantization_config": {"quant_method": "MINE"}}, schemes={"mine": THERE + "x"})
    assert related(text="short", pipelines={"short": "cse"})


def test_a_pass_of_an_extension_that_changes_nothing_is_noted() -> None:
    registry = combine([*load().extensions, Extension("mine", passes=PASS, ops=OP)])
    m = Module()
    used = used_extensions(registry, "cpu:portable", [registry.passes["cse"](), Mine()], m, {})
    assert used == {"mine": ["pass mine"]}
    report = [{"pass": "cse", "changes": 0}, {"pass": "mine{depth=2}", "changes": 0}]
    (note,) = idle_passes(used, report)
    assert "the pass mine of the extension mine changed nothing" in note
    assert not idle_passes(used, [*report, {"pass": "mine", "changes": 1}])


def test_kernels_of_one_extension_run_ops_that_the_pass_of_another_makes() -> None:
    one, other = Extension("one", passes=PASS, ops=OP), Extension("other", kernels={"mine/op": THERE + "OF_MINE"})
    registry = combine([*load().extensions, one, other])
    target = load().target("cpu:portable")
    assert related_extensions(registry, target, "serve, after fuse-norm: mine", {}) == {"one", "other"}
    assert related_extensions(registry, target, "serve", {}) == set()


def test_the_key_has_only_the_files_of_related_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pass").mkdir()
    (tmp_path / "pass" / "norm_pass.py").write_text("EXTENSION = None")
    info = tmp_path / "pass" / "norm_pass-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: norm-pass\nVersion: 1\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def entry(uses: bool) -> Path | None:
        return Reuse(tmp_path / "cache", model, {}, lambda point: uses and "norm_pass" in point.value).entry

    before = entry(True)
    monkeypatch.syspath_prepend(tmp_path / "pass")
    (info / "entry_points.txt").write_text("[llmc.extensions]\nnorm = norm_pass:EXTENSION\n")
    assert entry(False) == before != entry(True)


def test_the_registry_knows_the_extension_of_an_entry_point() -> None:
    registry: Registry = load()
    assert registry.points["llmc.builtin:EXTENSION"] == "llmc"
