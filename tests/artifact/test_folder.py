"""Artifacts that are refused: changed, truncated, combined from parts of others, or made for another machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from artifact import tiny
from draw import of_test
from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.manifest import MINOR, TargetInfo
from llmc_runtime.host_info import Host, check_target, this_host

from llmc.artifact.write import write_artifact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_artifact(folder / "toy.llmc", tiny.parts(folder))
    return folder / "toy.llmc"


@pytest.fixture
def toy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "toy.llmc")
    return tmp_path / "toy.llmc"


def refused(path: Path, code: str = "E1") -> LlmcError:
    """The one error that opening gives, clear and soon."""
    begin = time.monotonic()
    with pytest.raises(LlmcError) as caught:
        open_artifact(path)
    error = caught.value
    assert error.code.startswith(code), str(error)
    assert error.remedy and len(str(error).splitlines()) <= 5 and time.monotonic() - begin < 2
    return error


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def redigest(path: Path, change: str, to: str) -> None:
    """Change fields of the manifest, and update its digest."""
    text = (path / "manifest.json").read_bytes()
    assert change.encode() in text
    text = text.replace(change.encode(), to.encode())
    digest = text[text.index(b'"digest": "') + 11 :][:64]
    zero = text.replace(digest, b"0" * 64, 1)
    (path / "manifest.json").write_bytes(zero.replace(b"0" * 64, sha256(zero).encode(), 1))


def test_a_written_artifact_opens_and_can_be_moved(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "elsewhere")
    artifact = open_artifact(tmp_path / "elsewhere")
    assert isinstance(artifact, Artifact) and [p.name for p in artifact.programs] == ["decode", "step"]
    assert artifact.tensors["table"].data.tobytes() == tiny.table().tobytes()
    assert artifact.tensors["table"].data.ctypes.data % 64 == 0
    assert artifact.read("tokenizer/tokenizer.json") == b'{"toy": true}\n'
    assert (artifact.tokenizer_dir / "tokenizer.json").is_file()
    names = {p.relative_to(whole).as_posix() for p in files(whole)}
    kernels = {n for n in names if n.startswith("kernels/")}
    assert sorted(Path(n).suffix for n in kernels) == [".cpp", ".cpp", ".so", ".so"]
    assert names - kernels == {
        "manifest.json", "programs/decode.json", "programs/step.json", "weights/00000.safetensors",
        "tokenizer/tokenizer.json", "ir/00-canonicalize.llir", "report/memory.json",
    }  # fmt: skip


def test_a_changed_byte_anywhere(toy: Path) -> None:
    rng = random.Random(of_test())
    for path in files(toy):
        data = path.read_bytes()
        for at in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(12))}:
            bad = bytearray(data)
            bad[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            assert path.name in refused(toy).cause, at
        path.write_bytes(data)
    open_artifact(toy)


def test_a_changed_name_of_a_weight_for_a_gpu(tmp_path: Path) -> None:
    """The device hashes the weights, but errors caused by a damaged header before that are reported as damage."""
    parts = replace(tiny.parts(tmp_path), target=TargetInfo("cuda:sm_90", "sm_90", ()))
    write_artifact(tmp_path / "toy.llmc", parts)
    assert open_artifact(tmp_path / "toy.llmc").unchecked
    path = tmp_path / "toy.llmc/weights/00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"table"', b'"tablf"', 1))
    assert "is damaged" in refused(tmp_path / "toy.llmc", "E107").cause
    with pytest.raises(LlmcError, match="E113"):
        open_artifact(tmp_path / "toy.llmc", verify=False)


def test_every_byte_of_the_manifest(toy: Path) -> None:
    path = toy / "manifest.json"
    data = path.read_bytes()
    for at in range(0, len(data), 3):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        refused(toy)


def test_every_file_cut_short(toy: Path) -> None:
    for path in files(toy):
        data = path.read_bytes()
        for size in {0, 1, len(data) // 2, len(data) - 1, *range(4096, len(data), 4096)}:
            path.write_bytes(data[:size])
            assert path.name in refused(toy).cause
        path.write_bytes(data + b"\0")
        assert path.name in refused(toy).cause
        path.write_bytes(data)


def test_every_file_missing(toy: Path) -> None:
    for path in files(toy):
        data = path.read_bytes()
        path.unlink()
        assert path.name in refused(toy).cause
        path.write_bytes(data)


def test_a_damaged_block_is_named(toy: Path) -> None:
    path = toy / "weights/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "block 1 of 1 (from byte 0)" in refused(toy, "E107").cause
    open_artifact(toy, verify=False)  # for those who hashed it themselves


def test_files_of_two_artifacts(toy: Path, tmp_path: Path) -> None:
    other = tiny.parts(tmp_path)
    other.weights.source.tensors["table"] = tiny.table()[::-1].copy()  # type: ignore[union-attr]
    write_artifact(tmp_path / "other.llmc", other)
    shutil.copy(tmp_path / "other.llmc/weights/00000.safetensors", toy / "weights/00000.safetensors")
    refused(toy, "E107")


@pytest.mark.parametrize("target", ["/etc/passwd", "tokenizer2.json"])
def test_links_are_refused(toy: Path, target: str) -> None:
    path = toy / "tokenizer/tokenizer.json"
    path.rename(toy / "tokenizer/tokenizer2.json")
    path.symlink_to(target)
    assert "is a link" in refused(toy, "E104").cause


def test_a_linked_folder_inside_is_refused(toy: Path) -> None:
    (toy / "tokenizer").rename(toy / "real")
    (toy / "tokenizer").symlink_to("real")
    refused(toy, "E104")


def test_a_pipe_does_not_hang(toy: Path) -> None:
    path = toy / "tokenizer/tokenizer.json"
    path.unlink()
    os.mkfifo(path)
    refused(toy, "E104")


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../etc/passwd", "tokenizer/../../x", "tokenizer/.x"])
def test_names_that_lead_outside(toy: Path, name: str) -> None:
    redigest(toy, "tokenizer/tokenizer.json", name)
    assert name in refused(toy, "E104").cause


def test_no_manifest_is_an_incomplete_artifact(toy: Path, tmp_path: Path) -> None:
    (toy / "manifest.json").unlink()
    assert "is incomplete: it has no manifest.json" in refused(toy, "E101").cause
    (tmp_path / "empty").mkdir()
    (toy / "config.json").write_text("{}")
    error = refused(toy, "E101")
    assert "is a Hugging Face folder, not an artifact" in error.cause and "llmc compile" in error.remedy
    assert "is an empty folder" in refused(tmp_path / "empty", "E101").cause
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    assert "is not an artifact: it has no manifest.json" in refused(tmp_path / "other", "E101").cause
    assert "does not exist" in refused(tmp_path / "nothing", "E101").cause
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refused(tmp_path / "file", "E101").cause


@pytest.mark.parametrize(("major", "remedy"), [(3, "upgrade"), (1, "recompile")])
def test_another_format_version(toy: Path, major: int, remedy: str) -> None:
    redigest(toy, '"major": 2', f'"major": {major}')
    error = refused(toy, "E102")
    assert f"format version {major}.{MINOR}; this runtime reads version 2" in error.cause and remedy in error.remedy


@pytest.mark.parametrize(
    ("name", "words"), [("demo/model-1", "demo/model-1"), ("x; rm -rf ~", "MODEL"), ("--force", "MODEL"), ("", "MODEL")]
)
def test_an_older_artifact_is_refused_with_the_command_that_makes_it_anew(toy: Path, name: str, words: str) -> None:
    """Names that are not plain do not get into the command: the manifest is not checked yet."""
    old = {"format": {"major": 1, "minor": 0}, "source": {"name": name}, "target": {"name": "cuda:sm_90"}}
    (toy / "manifest.json").write_text(json.dumps(old))
    command = f"llmc compile {words} --target cuda:sm_90 -o {toy} --force"
    assert refused(toy, "E102").remedy.endswith(command)


def test_the_version_is_read_before_all_else(toy: Path) -> None:
    """A format of the future may hash itself otherwise."""
    (toy / "manifest.json").write_text(json.dumps({"format": {"major": 9, "minor": 1}}))
    refused(toy, "E102")


def test_a_cpu_that_lacks_features(tmp_path: Path) -> None:
    features = ("sse2", "avx777", "zmm_9", "quux", "a", "b")
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path, features))
    error = refused(tmp_path / "toy.llmc", "E110")
    assert error.cause.endswith("this CPU lacks a, avx777, b, quux and 1 more") and "cpu:native" in error.remedy
    open_artifact(tmp_path / "toy.llmc", host=Host(this_host().machine, frozenset(features)))


def test_another_machine(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path, arch="riscv64"))
    assert "is for riscv64 (cpu:test); this machine is" in refused(tmp_path / "toy.llmc", "E109").cause


def test_feature_names_of_compilers_and_kernels_are_one() -> None:
    host = Host("x86_64", frozenset(("avx512_bf16", "abm", "pni", "sse4_1")))
    check_target(TargetInfo("t", "x86-64-v4", ("avx512bf16", "lzcnt", "sse3", "sse4.1")), host)
    with pytest.raises(LlmcError, match="E110"):
        check_target(TargetInfo("t", "x86-64-v4", ("avx512vnni",)), host)


def test_a_kernel_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from llmc_runtime.device.cpu_device import CpuDevice

    parts = tiny.parts(tmp_path)
    broken = replace(parts, kernels=(replace(parts.kernels[0], binary=b"\x7fELF not really"), parts.kernels[1]))
    write_artifact(tmp_path / "a.llmc", broken)
    with pytest.raises(LlmcError, match=r"E112.*cannot be loaded.*\n.*recompile"):
        CpuDevice(1).load(open_artifact(tmp_path / "a.llmc"))
    with monkeypatch.context() as patch, pytest.raises(LlmcError, match=r"E112.*cannot be loaded.*\n.*noexec"):
        patch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
        CpuDevice(1).load(open_artifact(tmp_path / "a.llmc"))
    strange = replace(parts, kernels=(replace(parts.kernels[0], abi="cpu-9"), parts.kernels[1]))
    write_artifact(tmp_path / "b.llmc", strange)
    with pytest.raises(LlmcError, match=r"E112.*'cpu-9'"):
        CpuDevice(1).load(open_artifact(tmp_path / "b.llmc"))


def test_a_program_that_needs_what_is_not_there(tmp_path: Path) -> None:
    from dataclasses import replace

    parts = tiny.parts(tmp_path)
    for i, wrong in enumerate(
        (
            replace(parts, kernels=parts.kernels[:1]),
            replace(parts, states=parts.states[1:]),
            replace(parts, programs=[tiny_weight(p) for p in parts.programs]),
        )
    ):
        write_artifact(tmp_path / f"{i}.llmc", wrong)
        refused(tmp_path / f"{i}.llmc", "E113")


def tiny_weight(program: object) -> object:
    from dataclasses import replace

    from llmc_runtime.format import expr

    buffers = [replace(b, bytes=expr.of(4)) if b.name == "table" else b for b in program.buffers]  # type: ignore[attr-defined]
    return replace(program, buffers=tuple(buffers))  # type: ignore[type-var]
