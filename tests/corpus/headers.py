"""Damaged safetensors files and indexes: in a checkpoint, and in an artifact with correct hashes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from corpus.artifacts import opened, resigned
from corpus.damage import NASTY, changed, damaged, flipped
from corpus.judge import Case

from llmc.cli import _report
from llmc.frontend.safetensors_reader import TensorFiles

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED = "names and shapes are held against the model's when it is known"
DTYPES = ("F32", "f32", "F33", "F4", "F6_E2M3", "U4", "BOOL", "C64", "", "F32 ", "I128", "F8_E4M3", "BF16")


def exit_code_of(do: Callable[[], Any]) -> int:
    """Print the error of `do` as the command line does, and return the exit code."""
    try:
        do()
    except Exception as e:
        return _report(e, False)
    return 0


def read_all(folder: Path) -> None:
    """Open a checkpoint's files and read every tensor."""
    files = TensorFiles(folder)
    for tensor in files.tensors.values():
        files.read(tensor.name, slice(None))
    files.close()


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def whole() -> tuple[dict[str, Any], bytes]:
    """A good header and its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in (
        ("a.weight", "F32", [3, 5], 60), ("b", "BF16", [4], 8), ("c.bias", "I64", [2], 16), ("d", "F16", [], 2),
        ("e", "U8", [0, 7], 0),
    ):  # fmt: skip
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, bytes(range(at))


def by_hand(rng: Random) -> Iterator[tuple[str, bytes]]:
    """Headers of each kind of lie."""
    header, data = whole()
    good = file_of(header, data)
    for n in (0, 1, 7, len(good), len(good) - 8, 1 << 20, 99_999_999, 100_000_000, 100_000_001, 1 << 31, 1 << 32):
        yield f"a length of {n}", file_of(header, data, n)
    for n in ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8):
        yield f"a length of {n}", file_of(header, data, n)

    def one(**fields: Any) -> bytes:
        return file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}, bytes(8))

    for value in NASTY:
        for key in ("dtype", "shape", "data_offsets"):
            yield f"{key} = {value!r:.40}", one(**{key: value})
        yield f"a dimension = {value!r:.40}", one(shape=[value])
        yield f"an end = {value!r:.40}", one(data_offsets=[0, value])
        yield f"a begin = {value!r:.40}", one(data_offsets=[value, 8])
    for dtype in DTYPES:
        yield f"dtype {dtype!r}", one(dtype=dtype)
    for shape in (
        [1 << 32, 1 << 32],
        [1 << 63, 2],
        [1 << 62, 4, 4],
        [0, 1 << 63],
        [3],
        [1] * 100_000,
        [2, 0],
        [-2, -1],
    ):
        yield f"shape {shape!r:.40}", one(shape=shape)
    a = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    yield "two in one place", file_of({"a": a, "b": a}, bytes(4))
    yield "an overlap", file_of({"a": a, "b": {**a, "data_offsets": [2, 6]}}, bytes(6))
    yield "a gap", file_of({"a": a, "b": {**a, "data_offsets": [6, 10]}}, bytes(10))
    yield "bytes left over", file_of({"a": a}, bytes(9))
    yield "bytes that lack", file_of({"a": a}, bytes(3))
    yield "a name twice", file_of(b'{"a": %b, "a": %b}' % ((json.dumps(a).encode(),) * 2), bytes(4))
    yield "an empty name", file_of({"": a}, bytes(4))
    yield "names of control letters", file_of({"\x1b[31m\n\n\n\n\n\n": {**a, "shape": [5]}}, bytes(4))
    yield "a name of a million letters", file_of({"x" * 1_000_000: {**a, "shape": [5]}}, bytes(4))
    yield "no object", file_of(b"[1, 2, 3]")
    yield "not UTF-8", file_of(b'{"\xff\xfe": 1}')
    yield "NaN", file_of(b'{"a": NaN}')
    yield "a number of a million digits", file_of(b'{"a": ' + b"9" * 1_000_000 + b"}")


def many(name: str, count: int) -> bytes:
    """Headers that are large and well formed as JSON, made when they are needed."""
    if name == "tensors without bytes":
        one = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        return file_of(b"{" + b",".join(one % i for i in range(count)) + b"}")
    if name == "metadata":
        return file_of(b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(count)) + b"}}")
    if name == "lists":
        return file_of(b'{"a":[' + b"[]," * count + b"[]]}")
    if name == "brackets":
        return file_of(b"[" * count)
    return file_of(b" " * count + b"{}")


MANY = (
    ("tensors without bytes", 1_500_000), ("tensors without bytes", 300_000), ("metadata", 5_000_000),
    ("lists", 20_000_000), ("brackets", 30_000_000), ("blanks", 99_000_000), ("blanks", 101_000_000),
)  # fmt: skip


def headers(artifact: Path, folder: Path, rng: Random, count: int) -> Iterator[Case]:
    """A file by itself as a checkpoint, and as the weights of an artifact that its writer hashed."""
    header, data = whole()
    good = file_of(header, data)
    found = [*by_hand(rng), *((f"cut to {n}", good[:n]) for n in range(len(good)))]
    for _ in range(count):
        kind = rng.randrange(3)
        if kind == 0:
            doc, words = changed(header, rng)
            found.append((words, file_of(doc, data)))
        else:
            bad, words = (flipped if kind == 1 else damaged)(good[: len(good) - len(data)], rng)
            found.append((words, bad + data))
    for name, bad in found:
        yield Case("headers", f"checkpoint, {name}", partial(_as_checkpoint, bad), NAMED)
        yield Case("headers", f"artifact, {name}", partial(_as_weights, artifact, bad), "its hashes are right")


def large(artifact: Path, folder: Path) -> Iterator[Case]:
    """Headers whose size would fill the memory; they are written beforehand."""
    for i, (name, size) in enumerate(MANY):
        path = folder / f"{i}.safetensors"
        path.write_bytes(many(name, size))
        yield Case("headers", f"checkpoint, {size} {name}", partial(_as_checkpoint, path), NAMED)
        yield Case("headers", f"artifact, {size} {name}", partial(_as_weights, artifact, path), "its hashes are right")


def _as_checkpoint(bad: bytes | Path, folder: Path) -> int:
    if isinstance(bad, Path):
        os.link(bad, folder / FILE)
    else:
        (folder / FILE).write_bytes(bad)
    return exit_code_of(lambda: read_all(folder))


def _as_weights(artifact: Path, bad: bytes | Path, folder: Path) -> int:
    """`--no-verify` replaces correct hashes, whose computation takes long for a large file."""
    from llmc_runtime.artifact import open_artifact

    path = Path(shutil.copytree(artifact, folder / "bad.llmc"))
    name = "weights/00000.safetensors"
    if not isinstance(bad, Path):
        resigned(path, name, bad)
        return opened(path)
    (path / name).unlink()
    os.link(bad, path / name)
    text = (path / "manifest.json").read_bytes()
    size = json.loads(text)["weights"]["files"][0]["bytes"]
    resigned(path, "manifest.json", text.replace(b'"bytes": %d' % size, b'"bytes": %d' % bad.stat().st_size))
    block = json.loads((path / "manifest.json").read_text())
    block["weights"]["files"][0]["blocks"] *= -(-bad.stat().st_size // block["weights"]["files"][0]["block"])
    resigned(path, "manifest.json", json.dumps(block).encode())
    return exit_code_of(lambda: open_artifact(path, verify=False))


def indexes(rng: Random, count: int) -> Iterator[Case]:
    """Indexes that name files that do not exist or are outside of the folder."""
    header, data = whole()
    good = file_of(header, data)
    names = [n for n in header if n != "__metadata__"]
    index = {"metadata": {"total_size": len(data)}, "weight_map": dict.fromkeys(names, "a.safetensors")}

    def case(name: str, harm: Callable[[Path], Any], harmless: str = "") -> Case:
        def act(folder: Path) -> int:
            folder = folder / "model"
            folder.mkdir()
            (folder / "a.safetensors").write_bytes(good)
            (folder / INDEX).write_text(json.dumps(index))
            harm(folder)
            return exit_code_of(lambda: read_all(folder))

        return Case("indexes", name, act, harmless)

    def to(target: str) -> dict[str, Any]:
        return {"weight_map": dict.fromkeys(names, target)}

    outside = ("../x.safetensors", "/etc/passwd", "../model/a.safetensors", "a/b", ".", "..", "", "a.safetensors/", "~")
    for target in (*outside, "a\0b", "x" * 5000, "\ud800", "model.safetensors", INDEX, "/dev/zero", "a.safetensors\n"):
        yield case(f"files named {target[:30]!r}", lambda f, t=target: (f / INDEX).write_text(json.dumps(to(t))))
    for i in range(count):
        doc, words = changed(index, rng)
        yield case(f"{i} {words}", lambda f, d=doc: (f / INDEX).write_text(json.dumps(d)), NAMED)
        bad, words = damaged(json.dumps(index).encode(), rng)
        yield case(f"{i} {words}", lambda f, b=bad: (f / INDEX).write_bytes(b), NAMED)
    text = json.dumps(index)
    for n in range(0, len(text), 7):
        yield case(f"cut to {n}", lambda f, n=n: (f / INDEX).write_text(text[:n]))
    for what, make in DEVICES.items():
        for name in ("a.safetensors", INDEX):
            yield case(f"{name} {what}", lambda f, n=name, m=make: ((f / n).unlink(), m(f / n)))

        def single(f: Path, m: Callable[[Path], Any] = make) -> None:
            (f / INDEX).unlink()
            m(f / FILE)

        yield case(f"{FILE} {what}", single)
    big = {"weight_map": {f"{i}": "a.safetensors" for i in range(400_000)}}
    yield case("400000 names", lambda f: (f / INDEX).write_text(json.dumps(big)))
    yield case("an index of 2 GB", lambda f: os.truncate(f / INDEX, 2 << 30))


DEVICES: dict[str, Callable[[Path], Any]] = {
    "is a pipe": os.mkfifo,
    "is a folder": lambda p: p.mkdir(),
    "links to zeros without end": lambda p: p.symlink_to("/dev/zero"),
    "links to nothing": lambda p: p.symlink_to("nothing"),
    "links to itself": lambda p: p.symlink_to(p.name),
    "links to /etc/passwd": lambda p: p.symlink_to("/etc/passwd"),
    "is empty": lambda p: p.write_bytes(b""),
    "has zeros alone": lambda p: p.write_bytes(bytes(100_000)),
}
