"""CubinToolchain: the base of toolchains that compile a text to a cubin, checked when it is made and cached by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llmc.codegen.cubin import check_launch
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import (
    Compiled,
    Progress,
    compile_error,
    compile_in_threads,
    entry_path,
    read_entry,
    write_entry,
)


class CubinToolchain(ABC):
    """compiler: its name and version, for errors. suffix: of the files that hold texts which do not compile."""

    suffix: str

    @property
    @abstractmethod
    def compiler(self) -> str:
        """The name and version of the compiler."""

    @abstractmethod
    def key(self, source: Source) -> str:
        """Return a hash of text, launch, compiler and its options: 32 hexadecimal digits."""

    @abstractmethod
    def translate(self, source: Source) -> tuple[bytes, str]:
        """Return (cubin, ""), or (b"", the compiler's messages) if the text does not compile."""

    def reason(self, lines: Sequence[str]) -> str:
        """Return the line of the compiler's messages that names the cause of a failure; no line is empty."""
        return next((line for line in lines if "error" in line), lines[0])

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return entry_path(cache, key).is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile pairs (source, location), up to `jobs` at a time; return key -> cubin.

        Raises Diagnostic E502 if a source does not compile, E505 if a binary's parameters differ from those that its
        launches pass, and the errors of `translate`.
        """

        def compile_one(key: str, source: Source, loc: str) -> Compiled:
            return self._compiled(key, source, loc, cache)

        return compile_in_threads(sources, self.key, compile_one, cache, jobs, progress)

    def _compiled(self, key: str, source: Source, loc: str, cache: Path) -> Compiled:
        """Return a compiled kernel, from the cache if it is there. Raises Diagnostic E502 or E505."""
        path = entry_path(cache, key)
        if (entry := read_entry(path)) is not None:
            return entry
        binary, message = self.translate(source)
        if message:
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            saved = cache / f"{key}.failed.{self.suffix}"
            raise compile_error(self.compiler, source, self.reason(lines), saved, loc, message)
        check_launch(source, binary, loc)
        compiled = Compiled(binary, source.threads, source.shared, tuple((m.box, m.swizzle) for m in source.maps))
        write_entry(path, compiled)
        return compiled


def lacking(packages: Mapping[str, str]) -> str:
    """Return which package is not installed or has another version, or "". "13." is any version that begins so."""
    for name, supported in packages.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
        if installed != supported and not (supported.endswith(".") and installed.startswith(supported)):
            return f"{name} {installed} is installed, and only {supported.rstrip('.')} is supported"
    return ""


def launch_facts(source: Source) -> list[Any]:
    """Return the parts of a source's launches that a key depends on, without the grid."""
    maps = [(m.param, len(m.shape), m.box, m.swizzle) for m in source.maps]
    passes = [(p.kind, p.index, p.nbytes) for p in source.passes]
    return [source.entry, passes, source.threads, source.shared, maps]
