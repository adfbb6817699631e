"""CPU targets: names, detection, and flags that allow exactly the recorded features."""

from __future__ import annotations

import subprocess

import pytest

from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.targets.cpu_targets import EXTRAS, V2, V3, V4, detect

NAMES = [name for name in load().targets if name.startswith("cpu:")]


def cpuinfo(flags: frozenset[str]) -> str:
    return f"processor\t: 0\nmodel name\t: x\nflags\t\t: fpu sse {' '.join(sorted(flags))}\n"


@pytest.mark.parametrize("name", NAMES)
def test_names_parse_to_records(name: str) -> None:
    t = load().target(name)
    assert t.name == name and t.family == "cpu" and t.page_size == 16
    assert t.peaks["f32"] > 0 and t.bandwidth > 0
    hash(t.features), hash(t.flags)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(Diagnostic) as e:
        load().target("cpu:zen")
    assert e.value.code == "E510" and all(name in str(e.value) for name in load().targets)
    for bad in ("cpu:x86-64-v4+avx1024", "cpu:x86-64-v3+avx512_bf16", "cpu:portable+avx512_vnni"):
        with pytest.raises(Diagnostic, match="extra feature"):
            load().target(bad)


def test_extra_features_are_requested_by_name() -> None:
    t = load().target("cpu:x86-64-v4+avx512_bf16+avx512_vnni")
    assert t.features == V4 | {"avx512_bf16", "avx512_vnni"}
    assert set(t.flags) >= {"-mavx512bf16", "-mavx512vnni"} and t.has("avx512_bf16")
    assert load().target("cpu:x86-64-v4").features == V4


@pytest.mark.parametrize(
    ("have", "arch", "features"),
    [
        (V4 | {"avx512_bf16", "avx_vnni", "amx_tile"}, "x86-64-v4", V4 | {"avx512_bf16", "avx_vnni"}),
        (V3 | {"avx512f"}, "x86-64-v3", V3),
        (V4 - {"avx512vl"} | {"avx512_bf16"}, "x86-64-v3", V3),
        (V2, None, frozenset()),
    ],
)
def test_the_machine_at_hand_is_read_from_cpuinfo(
    have: frozenset[str], arch: str | None, features: frozenset[str]
) -> None:
    t = detect(cpuinfo(have), 4)
    assert t.name == "cpu:native" and t.features == features and t.limits.threads == 4
    assert t.arch == (arch or load().target("cpu:portable").arch)


def test_detection_without_cpuinfo_is_portable() -> None:
    assert detect("", 1).features == frozenset()


@pytest.mark.parametrize("name", ["cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4+avx512_bf16", "cpu:portable"])
def test_flags_allow_the_recorded_features_and_no_more(name: str) -> None:
    """The flags allow exactly the instructions of the features that the artifact requires."""
    t = load().target(name)
    argv = [CppToolchain.find(t).compiler, *t.flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    defined = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    macros = {"avx2": "__AVX2__", "fma": "__FMA__", "avx512f": "__AVX512F__", "avx512vl": "__AVX512VL__"}
    macros |= {f: f"__{f.replace('_', '').upper()}__" for f in EXTRAS}
    for feature, macro in macros.items():
        assert (f"#define {macro} 1" in defined) == (feature in t.features), feature
