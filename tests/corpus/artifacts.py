"""Damaged artifacts: flipped bytes, every truncation, links, names that lead outside, and invalid documents with
correct hashes. models.py has the damaged models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import textkit
from artifact import tiny
from corpus.damage import changed, flipped
from corpus.judge import Case
from llmc_runtime.cli import run_command
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.names import MANIFEST_FILE

from llmc.artifact.hard_link import last_stage
from llmc.artifact.write import write_artifact
from llmc.cli import _report, main
from llmc.targets.cpu_targets import portable

UNREAD = "it reads no weights"
SAME = "nothing that it reads says otherwise"


def toy(folder: Path) -> Path:
    """An artifact with all that one can have: kernels, programs, weights, tokenizer, template, stages, a canary."""
    config = {"chat_template": textkit.TEMPLATE, "bos_token": None}
    files = textkit.write_folder(folder / "tokenizer", textkit.small(), config)
    parts = replace(
        tiny.parts(folder), tokenizer=sorted(files.iterdir()), generation={"do_sample": False}, machine=portable()
    )
    write_artifact(folder / "toy.llmc", parts)
    assert main(["verify", "--record", str(folder / "toy.llmc")], open(os.devnull, "w")) == 0
    return folder / "toy.llmc"


def compiled(folder: Path) -> Path:
    """The demonstration model as llmc compiles it; in a process of its own, as torch would stay in this one."""
    out, model = folder / "demo.llmc", Path(__file__).parents[2] / "examples" / "demo-model"
    command = [sys.executable, "-m", "llmc.cli", "compile", str(model), "-o", str(out), "--no-cache"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return out


def run(path: Path, *more: str) -> int:
    """One token, as llmc-run writes it."""
    return run_command([str(path), "-p", "abc", "-n", "1", "-q", *more], compiles=False)


def opened(path: Path) -> int:
    """Open and load the artifact without running a step, since wrong arguments of kernels cannot be detected."""
    from llmc_runtime.api.llm import LLM
    from llmc_runtime.format.errors import LlmcError

    try:
        LLM(path, say=lambda line: None, kv_cache_memory_bytes=1 << 16).close()
    except LlmcError as e:
        print(e)
        return 1
    return 0


def diff(path: Path, other: Path) -> int:
    """Return 0 if the command ended as it should, with or without differences."""
    from llmc_runtime.format.errors import LlmcError

    from llmc.report.diff import diff, render

    try:
        print(render(diff(str(other), str(path)), 20))
    except LlmcError as e:
        print(e)
        return 1
    return 0


def packed(path: Path) -> int:
    """Read what `llmc pack` reads of an artifact before it opens the checkpoint."""
    try:
        last_stage(path)
    except Exception as e:
        return _report(e, False)
    return 0


LOOKS: dict[str, Callable[[Path], int]] = {
    "inspect": lambda p: main(["inspect", str(p)]),
    "pack": lambda p: packed(p),
    "report": lambda p: main(["report", str(p), "-o", str(p.parent / "page.html")]),
}


def files_of(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def harmed(source: Path, folder: Path, name: str, data: bytes | None) -> Path:
    """A copy in `folder` (hard links) in which one file has other bytes, or is not there."""
    out = folder / "bad.llmc"
    for each in files_of(source):
        (out / each).parent.mkdir(parents=True, exist_ok=True)
        if each != name:
            os.link(source / each, out / each)
    if data is not None:
        (out / name).write_bytes(data)
    return out


def flips(source: Path, rng: Random, count: int) -> Iterator[Case]:
    """One changed byte each: half of them by file, half by place; run, and one more command in turn."""
    contents = {n: (source / n).read_bytes() for n in files_of(source)}
    contents = {n: data for n, data in contents.items() if data}
    total = list(contents), [len(d) for d in contents.values()]
    for i in range(count):
        name = rng.choice(total[0]) if i % 2 else rng.choices(*total)[0]
        data, words = flipped(contents[name], rng)
        yield from _commands("flips", source, name, data, f"{name}: {words}", i)


def _commands(family: str, source: Path, name: str, data: bytes, words: str, turn: int) -> Iterator[Case]:
    """`llmc-run` on it, and in turn what looks into it."""

    def act(command: Callable[[Path], int], folder: Path) -> int:
        return command(harmed(source, folder, name, data))

    word = Path(name).name
    yield Case(family, f"run, {words}", partial(act, run), names=word)
    weights = name.startswith("weights/")
    turns: list[tuple[str, Callable[[Path], int], str]] = [
        ("verify", lambda p: main(["verify", str(p)]), ""),
        ("diff", lambda p: diff(p, source), UNREAD if weights else ""),
        *((n, c, UNREAD if weights else "") for n, c in LOOKS.items()),
        ("run --no-verify", lambda p: run(p, "--no-verify"), "the hashes were not wanted" if weights else ""),
    ]
    what, command, harmless = turns[turn % len(turns)]
    yield Case(family, f"{what}, {words}", partial(act, command), harmless, "" if harmless else word)


def manifest_flips(source: Path, rng: Random, step: int) -> Iterator[Case]:
    """Every `step`-th byte of the manifest."""
    data = (source / MANIFEST_FILE).read_bytes()
    for i in range(rng.randrange(step), len(data), step):
        bad, words = flipped(data, rng, i)
        yield from _commands("manifest", source, MANIFEST_FILE, bad, words, i)


def truncations(source: Path, rng: Random, step: int) -> Iterator[Case]:
    """Every file cut to every `step`-th length, and a byte too long."""
    for name in files_of(source):
        data = (source / name).read_bytes()
        for size in [*range(rng.randrange(step), len(data), step), len(data) + 1]:
            bad = (data + b"\0")[:size]
            words = f"{name} cut to {size} of {len(data)} bytes"

            def act(folder: Path, name: str = name, bad: bytes = bad) -> int:
                return run(harmed(source, folder, name, bad))

            yield Case("truncations", words, act, names=Path(name).name)


def resigned(path: Path, name: str, data: bytes) -> None:
    """Give the file other bytes, and the manifest their right hash."""
    if name != MANIFEST_FILE:
        (path / name).unlink()
        (path / name).write_bytes(data)
        doc = json.loads((path / MANIFEST_FILE).read_text())
        if name in doc["files"]:
            doc["files"][name] = {"sha256": sha256(data), "bytes": len(data)}
        for w in doc["weights"]["files"]:
            if w["file"] == name:
                w |= {"bytes": len(data), "blocks": [sha256(data)]}
    else:
        doc = json.loads(data)
    digest = doc.get("digest") if isinstance(doc.get("digest"), str) and len(doc["digest"]) == 64 else "0" * 64
    text = json.dumps({"digest": digest, **{k: v for k, v in doc.items() if k != "digest"}}, indent=2).encode()
    zero = text.replace(digest.encode(), b"0" * 64, 1)
    (path / MANIFEST_FILE).unlink()
    (path / MANIFEST_FILE).write_bytes(zero.replace(b"0" * 64, sha256(zero).encode(), 1))


def nonsense(source: Path, rng: Random, count: int) -> Iterator[Case]:
    """Documents with one changed field and correct hashes, as a faulty or malicious writer could make them."""
    documents = {n: json.loads((source / n).read_text()) for n in files_of(source) if n.endswith(".json")}
    chosen = [n for n in documents if n == MANIFEST_FILE or n.startswith(("programs/", "report/"))]
    for i in range(count):
        name = rng.choice((MANIFEST_FILE, *chosen))
        doc, words = changed(documents[name], rng)

        def act(folder: Path, command: Callable[[Path], int], name: str = name, doc: Any = doc) -> int:
            path = harmed(source, folder, "", None)
            resigned(path, name, json.dumps(doc).encode())
            return command(path)

        turns: list[Callable[[Path], int]] = [opened, opened, *LOOKS.values(), lambda p: diff(p, source)]
        command = turns[i % len(turns)]
        if name.startswith("report/") and command is opened:
            command = LOOKS[rng.choice(list(LOOKS))]
        yield Case("nonsense", f"{i % len(turns)}, {name}: {words}", partial(act, command=command), SAME)


def folders(source: Path) -> Iterator[Case]:
    """Links, devices, folders in the place of files, names that lead outside."""

    def case(name: str, harm: Callable[[Path], None], names: str = "", harmless: str = "") -> Case:
        def act(folder: Path) -> int:
            path = Path(shutil.copytree(source, folder / "bad.llmc"))
            harm(path)
            return run(path)

        return Case("folders", name, act, harmless, names)

    def other(target: str, name: str) -> Callable[[Path], None]:
        def harm(path: Path) -> None:
            (path / name).unlink()
            os.symlink(target, path / name)

        return harm

    for name in files_of(source):
        word = Path(name).name
        yield case(f"{name} is missing", lambda p, n=name: (p / n).unlink(), word)
        yield case(f"{name} links to itself", other(word, name), word)
        yield case(f"{name} links outside", other("/etc/passwd", name), word)
        yield case(f"{name} links to zeros without end", other("/dev/zero", name), word)
        yield case(f"{name} links to its equal", other(str(source / name), name), word)
        yield case(f"{name} is a folder", lambda p, n=name: ((p / n).unlink(), (p / n).mkdir())[1], word)
        yield case(f"{name} is a pipe", lambda p, n=name: ((p / n).unlink(), os.mkfifo(p / n))[1], word)
    inner = sorted({n.partition("/")[0] for n in files_of(source) if "/" in n})
    for name in inner:

        def linked(path: Path, name: str = name) -> None:
            shutil.rmtree(path / name)
            os.symlink(source / name, path / name)

        yield case(f"{name} links to a folder", linked, name)
    for bad in ("/etc/passwd", "../x", "a/../../x", "a//b", "./a", ".hidden", "a\0b", "a\nb", "x" * 5000, "", "é", "/"):

        def renamed(path: Path, bad: str = bad) -> None:
            text = (path / MANIFEST_FILE).read_text().replace('"tokenizer/tokenizer.json"', json.dumps(bad))
            resigned(path, MANIFEST_FILE, text.encode())

        yield case(f"a file named {bad[:20]!r}", renamed, "", "")
    yield case("an empty folder", lambda p: (shutil.rmtree(p), p.mkdir())[1], "bad.llmc")
    yield case("no folder", lambda p: shutil.rmtree(p), "bad.llmc")
    yield case("a file", lambda p: (shutil.rmtree(p), p.write_text("x"))[1] and None, "bad.llmc")
