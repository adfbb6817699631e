"""Strict parsing of an artifact's files: size expressions, programs, manifests, safetensors headers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifact import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.artifact import open_artifact
from llmc_runtime.format import expr, hashing, safetensors
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import check_name, damaged, load_json
from llmc_runtime.format.manifest import MAJOR, MINOR, Manifest, check_digest
from llmc_runtime.format.program import Program

from llmc.artifact.write import write_artifact
from llmc.ir.dim import D, Dim

SYMBOLS = ("T", "R", "P")
atoms = st.one_of(st.integers(0, 300).map(D), st.sampled_from(SYMBOLS).map(D))
dims = st.recursive(
    atoms,
    lambda d: st.one_of(
        st.tuples(d, d).map(lambda p: p[0] + p[1]),
        st.tuples(d, d).map(lambda p: p[0] * p[1]),
        st.tuples(d, d).map(lambda p: p[0] - p[1]),
        st.tuples(d, st.integers(1, 64)).map(lambda p: p[0].ceildiv(p[1])),
    ),
    max_leaves=8,
)
values = st.fixed_dictionaries({s: st.integers(0, 5000) for s in SYMBOLS})


@settings(max_examples=300, deadline=None)
@given(dims, values)
def test_size_text_means_what_the_compiler_means(d: Dim, env: dict[str, int]) -> None:
    e = expr.parse(str(d))
    assert e(env) == d.subs(env).const
    assert e.symbols == d.symbols


@settings(max_examples=300, deadline=None)
@given(st.text("T()+-*,0123 ceilé_", max_size=24))
def test_any_text_is_a_size_or_one_error(text: str) -> None:
    try:
        e = expr.parse(text)
    except LlmcError as error:
        assert error.code == "E108" and "character" in error.cause
        return
    assert e(dict.fromkeys(e.symbols, 3)) == D(text).subs(dict.fromkeys(e.symbols, 3)).const


@pytest.mark.parametrize(
    "text",
    ["", "T T", "1+", "ceil(T)", "ceil(T, 0)", "ceil(T, R)", "T/2", "(T", "9" * 30, "(" * 100 + "T" + ")" * 100,
     "T" * 5000, "-" * 100 + "1", "__import__('os')", "T.x", "2**3"],
)  # fmt: skip
def test_not_a_size(text: str) -> None:
    with pytest.raises(LlmcError, match="E108"):
        expr.parse(text)


def test_a_size_without_its_symbol() -> None:
    with pytest.raises(LlmcError, match=r"E108.*needs a value for R"):
        expr.parse("T+R")({"T": 1})


@pytest.fixture
def program() -> Program:
    return tiny.program("step", "ab" * 16, "cd" * 16, False)


def test_a_program_reads_back(program: Program) -> None:
    assert Program.load(program.dump(), "p") == program
    assert program.kernel_table == (("ab" * 16, "toy"),)


def test_which_steps_a_program_serves(program: Program) -> None:
    assert program.fits({"T": 48, "R": 4}) and not program.fits({"T": 49, "R": 4})
    decode = tiny.program("decode", "ab" * 16, "cd" * 16, True)
    assert decode.fits({"T": 3, "R": 3}) and not decode.fits({"T": 4, "R": 3})


def test_programs_share_equal_buffers_and_launches(program: Program) -> None:
    again = Program.load(program.dump(), "q")
    first = Program.load(program.dump(), "p")
    assert all(a is b for a, b in zip(first.buffers, again.buffers, strict=True))
    assert all(a is b for a, b in zip(first.launches, again.launches, strict=True))
    Program.forget_interned()
    assert Program.load(program.dump(), "p").launches[0] is not first.launches[0]


def test_an_artifact_that_cannot_be_opened_leaves_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    load, read = Program.load, []

    def second_fails(data: bytes, where: str, lenient: bool = False) -> Program:
        if read:
            raise damaged(where, "is wrong")
        read.append(load(data, where, lenient))
        return read[0]

    monkeypatch.setattr(Program, "load", second_fails)
    with pytest.raises(LlmcError, match="is wrong"):
        open_artifact(tmp_path / "toy.llmc")
    assert load(read[0].dump(), "p").launches[0] is not read[0].launches[0]


def test_launches_share_the_values_of_fields_that_are_equal(program: Program) -> None:
    """Layers differ in arguments and locations only."""
    launch = program.launches[0]
    layers = replace(launch, loc="a"), replace(launch, loc="b", args=launch.args[::-1])
    made = replace(program, launches=layers)
    first, second = Program.load(made.dump(), "p").launches
    assert (first, second) == layers
    assert first.sizes is second.sizes and first.args is not second.args
    with pytest.raises(LlmcError, match=r"p\.launches\[1\]: 'args' is missing"):
        Program.load(broken(made, "launches", 1, "args"), "p")


def test_what_was_read_before_accepts_no_other_type(program: Program) -> None:
    """1, true and 1.0 are equal in Python."""
    Program.load(broken(program, "launches", 0, "threads", value=1), "p")
    for value in (True, 1.0):
        with pytest.raises(LlmcError, match="'threads' must be an integer"):
            Program.load(broken(program, "launches", 0, "threads", value=value), "p")


def test_an_error_names_the_element_of_a_list(program: Program) -> None:
    with pytest.raises(LlmcError, match=r"p\.launches\[0\]\.args\[1\]: must be an integer"):
        Program.load(broken(program, "launches", 0, "args", 1, value="x"), "p")


def broken(program: Program, *path: object, value: object = ...) -> bytes:
    doc = json.loads(program.dump())
    at = doc
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(doc).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("buffers", 2, "kind"), "heap", r"p\.buffers\[2\]: unknown kind 'heap'"),
        (("buffers", 2, "dtype"), "f33", "unknown dtype"),
        (("buffers", 2, "shape", 0), "R/2", "E108"),
        (("buffers", 2, "shape", 0), 1.5, "must be a size expression"),
        (("buffers", 2, "shape", 0), "Q", "uses an undeclared symbol"),
        (("buffers", 2, "name"), "rows", "two buffers have the same name"),
        (("buffers", 14, "alias"), "nobody", "alias of unknown buffer"),
        (("launches", 0, "args", 3), 15, "index is out of range"),
        (("launches", 0, "args", 3), -1, "index is out of range"),
        (("launches", 0, "kernel"), "../../x", "lower-case hex"),
        (("launches", 0, "sizes"), {}, "must be a list"),
        (("launches", 0, "extra"), 1, "unknown key 'extra'"),
        (("symbols", "T"), [4, 2], "is not a range"),
        (("serves", "Q"), [1, 2], "uses an undeclared symbol"),
        (("arena_bytes",), -1, "must be an integer in"),
        (("arena_bytes",), True, "must be an integer in"),
        (("ranks",), ..., "'ranks' is missing"),
        (("name",), 3, "'name' must be text"),
    ],
)
def test_a_program_with_a_wrong_field(program: Program, path: tuple[object, ...], value: object, message: str) -> None:
    if path == ("ranks",):
        assert Program.load(broken(program, *path), "p").ranks == 1  # it has a default
        return
    with pytest.raises(LlmcError, match=message):
        Program.load(broken(program, *path, value=value), "p")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        "\ufeff{}",
        '"\\ud800',
        "null",
    ],
)
def test_values_that_are_not_json(text: str) -> None:
    with pytest.raises(LlmcError, match="E103"):
        Program.load(text.encode(errors="surrogatepass"), "p")


def test_bytes_that_are_not_text() -> None:
    with pytest.raises(LlmcError, match="E103"):
        load_json(b"\xff\xfe{}", "p")


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "a/../b", "a//b", ".hidden", "a/.b", "a\\b", "a\0b", "é", "-rf", "x" * 300,
     "a/" * 9 + "b", "a\n"],
)  # fmt: skip
def test_unsafe_names(name: str) -> None:
    with pytest.raises(LlmcError, match="E104"):
        check_name(name, "x")


def test_the_manifest_reads_back(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    data = (tmp_path / "toy.llmc/manifest.json").read_bytes()
    assert Manifest.load(data) == manifest and manifest.dump() == data
    assert check_digest(data) == (manifest.digest, True)
    assert manifest.kv.bytes_per_page == 16 and manifest.kv.layers == 1


def test_a_newer_minor_version_may_say_more(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    this, newer = b'"minor": %d' % MINOR, b'"minor": %d, "x": 2' % (MINOR + 1)
    data = manifest.dump().replace(this, newer).replace(b'"compiler"', b'"more": [], "compiler"')
    zero = data.replace(manifest.digest.encode(), b"0" * 64)
    data = zero.replace(b"0" * 64, hashing.sha256(zero).encode(), 1)
    assert Manifest.load(data).format == (MAJOR, MINOR + 1)
    with pytest.raises(LlmcError, match="unknown key 'more'"):
        older = zero.replace(newer, this)
        Manifest.load(older.replace(b"0" * 64, hashing.sha256(older).encode(), 1))


def test_weight_files_have_the_rank_that_reads_them(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    (common,) = manifest.weights.files
    own = [replace(common, file=f"weights/rank{rank}/0.safetensors", rank=rank) for rank in range(2)]
    ranked = replace(manifest, ranks=2, weights=replace(manifest.weights, files=(common, *own)))
    found = Manifest.load(ranked.dump())
    assert found.ranks == 2 and found.weights.of_rank(1) == (common, own[1])
    with pytest.raises(LlmcError, match="a rank that a group of 1 lacks"):
        Manifest.load(replace(ranked, ranks=1).dump())


# --- safetensors ---


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(data: bytes) -> dict[str, safetensors.TensorInfo]:
    n = safetensors.header_length(data[:8], len(data), "f")
    return safetensors.parse_header(data[8 : 8 + n], len(data), "f")


def one(**fields: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234", file_of({}, length=1 << 40), file_of({}, length=99), file_of(b"[]"), file_of(b"{"),
        file_of(one(), b"1234567"), file_of(one(), b"123456789"), file_of(one(dtype="F33"), b"12345678"),
        file_of(one(shape=[3]), b"12345678"), file_of(one(shape=[-2]), b"12345678"),
        file_of(one(shape=[1 << 62, 1 << 62])), file_of(one(x=1), b"12345678"),
        file_of(one(shape=[2.0]), b"12345678"), file_of(one(shape=[1] * 17), b"12345678"),
        file_of(one(data_offsets=[4, 12]), b"x" * 12), file_of(one(data_offsets=[8, 0]), b"12345678"),
        file_of({**one(), "b": one()["a"]}, b"12345678"), file_of({"a": []}),
    ],
)  # fmt: skip
def test_malformed_safetensors(data: bytes) -> None:
    with pytest.raises(LlmcError, match=r"E10[35]"):
        read(data)


def test_all_readers_read_our_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    items = [
        ("a", "f32", (3, 5), 60),
        ("b", "u8", (), 1),
        ("c", "f32", (20000,), 80000),
        ("d", "i4", (3,), 2),
        ("e", "i32", (0, 4), 0),
    ]
    prefix, places, size = safetensors.plan(items)
    body = bytearray(size - len(prefix))
    for p in places:
        fill = 0 if p.name.startswith(safetensors.PAD) else 7
        body[p.begin - len(prefix) : p.end - len(prefix)] = bytes([fill]) * p.nbytes
    data = prefix + bytes(body)
    (tmp_path / "x.safetensors").write_bytes(data)
    theirs = {
        k: v for k, v in library.load_file(tmp_path / "x.safetensors").items() if not k.startswith(safetensors.PAD)
    }
    ours = read(data)
    assert list(ours) == ["a", "b", "c", "d", "e"] and set(theirs) == set(ours)
    for name, info in ours.items():
        assert info.begin % 64 == 0 and (info.nbytes < 65536 or info.begin % 4096 == 0)
        assert theirs[name].shape == info.shape and theirs[name].tobytes() == data[info.begin : info.end]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=9), st.integers(1, 64))
def test_hashing_a_stream_is_hashing_its_blocks(cuts: list[int], block: int) -> None:
    hasher = hashing.BlockHasher(block)
    whole = np.arange(sum(cuts), dtype=np.uint8).tobytes()
    at = 0
    for n in cuts:
        hasher.update(memoryview(whole[at : at + n]))
        at += n
    blocks = hasher.finish()
    assert blocks == tuple(hashing.sha256(whole[a:b]) for a, b in hashing.spans(len(whole), block))
    assert hashing.wrong_blocks(memoryview(whole), blocks, block) == []
    if whole:
        bad = bytearray(whole)
        bad[-1] ^= 1
        assert hashing.wrong_blocks(memoryview(bad), blocks, block) == [len(blocks) - 1]
