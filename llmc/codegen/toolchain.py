"""The interface of a toolchain, which compiles the kernels of one language, and the choice of one by language.

A language is a name on `Kernel` and `Source`. An `llmc.Extension` maps the name to a function `find(target)`, which
returns the toolchain or raises Diagnostic E501.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmc.codegen.kernel import Compiled, Source
from llmc.codegen.launch_plan import Placed
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Module
from llmc.targets.target import Target

Progress = Callable[[int, int, str], None]  # done, of, what
_STALE_SECONDS = 3600.0
_KEY_DIGITS = 32
SUFFIX = "gpu"


# (launched graphs, their module) -> the source of the step unit, and each graph's function in it
StepWriter = Callable[[Sequence[Placed], Module], tuple[Source, tuple[str, ...]]]


@dataclass(frozen=True)
class Output:
    """The output of a toolchain.

    source, binary: file suffixes without dots. abi: the calling convention of the binaries, which the runtime's device
    must support. step: writes the step unit, the compiled function that runs all launches of a program; None if the
    runtime launches kernels itself. Only the step writer of the target's first language is used.
    """

    source: str
    binary: str
    abi: str
    step: StepWriter | None = None


class Toolchain(Protocol):
    """Compiles the kernels of one language for one target, through a content-addressed cache."""

    @property
    def name(self) -> str:
        """The name of the compiler, such as "g++"; artifacts record it with `version`."""

    @property
    def version(self) -> str:
        """The version of the compiler."""

    @property
    def output(self) -> Output:
        """File suffixes and calling convention of sources and binaries."""

    def key(self, source: Source) -> str:
        """Return a hash, 32 hexadecimal digits, of all that the binary depends on."""

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the folder `cache` has the binary of this key."""

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile every (source, location in the model) and return the results by key.

        `jobs` sources are compiled at a time; progress(done, of, what) is called after each. Raises Diagnostic E502 if
        a source does not compile, and keeps its text in `cache`.
        """


Finders = Mapping[str, Callable[[Target], Toolchain]]  # by language


class Toolset:
    """The toolchains of one target. Each is looked up when its language is first used."""

    def __init__(self, target: Target, finders: Finders) -> None:
        self.target, self.finders = target, finders
        self._toolchains: dict[str, Toolchain] = {}

    def of(self, language: str) -> Toolchain:
        """Return the toolchain of a language.

        Raises Diagnostic E504 if no extension provides one, E501 if its compiler is not installed.
        """
        if language not in self._toolchains:
            if language not in self.finders:
                known = ", ".join(self.finders) or "none"
                cause = f"there is no toolchain for the language {language!r} (known: {known})"
                raise Diagnostic("E504", cause, "install the package that provides it (llmc.Extension, toolchains=...)")
            self._toolchains[language] = self.finders[language](self.target)
        return self._toolchains[language]

    def step_unit(self, placed: Sequence[Placed], m: Module) -> tuple[Source | None, tuple[str, ...]]:
        """Return the step unit of the launched graphs and each graph's function in it; (None, ()) if there is none."""
        write = self.of(self.target.languages[0]).output.step
        return write(placed, m) if write else (None, ())

    def key(self, source: Source) -> str:
        """Return the key of a source under its language's toolchain."""
        return self.of(source.language).key(source)

    def cached(self, source: Source, cache: Path) -> bool:
        """Whether the cache has the binary of a source."""
        tool = self.of(source.language)
        return tool.cached(tool.key(source), cache)

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile sources of any languages, one language after the other; see `Toolchain.compile`."""
        groups: dict[str, dict[str, tuple[Source, str]]] = {}
        for source, loc in sources:
            groups.setdefault(source.language, {})[self.key(source)] = source, loc
        total = sum(map(len, groups.values()))
        out: dict[str, Compiled] = {}
        for language, group in groups.items():
            step = _shifted(progress, len(out), total) if progress else None
            out |= self.of(language).compile(list(group.values()), cache, jobs, step)
        return out

    def versions(self) -> dict[str, str]:
        """Return compiler name -> version of the toolchains that were used."""
        return {t.name: t.version for t in self._toolchains.values()}


def installed(target: Target, finders: Finders) -> dict[str, str]:
    """Return language -> version of the toolchains for a GPU target, for the keys of cached artifacts.

    Empty for CPUs, whose artifacts do not depend on it. The target's first language is required; others are left out
    if their compiler is not installed. Raises Diagnostic E501 if the first one's is missing.
    """
    versions: dict[str, str] = {}
    if target.family == "cpu":
        return versions
    for language in target.languages:
        try:
            versions[language] = finders[language](target).version
        except Diagnostic as error:
            if error.code != "E501" or not versions:
                raise
    return versions


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    """Report the progress of one group as progress of all; `before` sources were compiled earlier."""
    return lambda done, of, what: progress(before + done, total, what)


def compile_in_threads(
    sources: Sequence[tuple[Source, str]], key: Callable[[Source], str],
    compile_one: Callable[[str, Source, str], Compiled], cache: Path, jobs: int, progress: Progress | None,
) -> dict[str, Compiled]:  # fmt: skip
    """Call compile_one(key, source, location) once per distinct key in up to `jobs` threads; return key -> result.

    The first error cancels the compilations that have not started, and is raised.
    """
    todo = {key(s): (s, loc) for s, loc in sources}
    out: dict[str, Compiled] = {}
    cache.mkdir(parents=True, exist_ok=True)
    sweep(cache)
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        futures = {k: pool.submit(compile_one, k, s, loc) for k, (s, loc) in todo.items()}
        try:
            for k, future in futures.items():
                out[k] = future.result()
                if progress:
                    progress(len(out), len(todo), title(todo[k][0]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return out


def title(source: Source) -> str:
    """Return the comment in the first line of a source, or else its entry."""
    comment = re.match(r"(?://|#)\s*(.*)", source.text.partition("\n")[0])
    return comment[1].strip() if comment else source.entry


def compile_error(compiler: str, source: Source, why: str, path: Path, loc: str, log: str) -> Diagnostic:
    """Return the Diagnostic E502 for a source that does not compile. The source's text is written to `path`.

    why: the compiler's reason. log: the compiler's complete output, if longer than `why`; it is saved next to the text,
    and shown by -v.
    """
    path.write_text(source.text)
    saved = f"the source was saved as {path}"
    if log:
        messages = path.with_suffix(".log")
        messages.write_text(log)
        saved += f", the compiler's messages as {messages.name} next to it"
    of_package = f" of the package {source.package}" if source.package else ""
    remedy = f"correct the kernel; {saved}" if source.package else f"{saved}; report it, or choose another target"
    error = Diagnostic("E502", f"{compiler} could not compile {title(source)}{of_package}: {why}", remedy, loc=loc)
    if log:
        error.add_note(log)
    return error


def sweep(cache: Path) -> None:
    """Remove work folders of killed compilations, which are folders unchanged for an hour."""
    for path in cache.glob("build-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # its owner has just removed it
            continue


def digest(fields: Sequence[Any]) -> str:
    """Return a hash of JSON values as the key of a binary: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:_KEY_DIGITS]


def entry_path(cache: Path, key: str) -> Path:
    """Return the path of a key's entry."""
    return cache / f"{key}.{SUFFIX}"


def read_entry(path: Path) -> Compiled | None:
    """Read an entry (one line of JSON, then the binary); None if it is absent, truncated or modified."""
    try:
        head, _, binary = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        intact = hashlib.sha256(binary).hexdigest() == facts["sha256"]
        boxes = tuple((tuple(map(int, box)), int(swizzle)) for box, swizzle in facts.get("boxes", ()))
        return Compiled(binary, int(facts["threads"]), int(facts["shared"]), boxes) if intact else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_entry(path: Path, c: Compiled) -> None:
    """Write an entry atomically."""
    head = {"threads": c.threads, "shared": c.shared, "sha256": hashlib.sha256(c.binary).hexdigest(), "boxes": c.boxes}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        entry = Path(folder, "entry")
        entry.write_bytes(json.dumps(head).encode() + b"\n" + c.binary)
        os.replace(entry, path)
