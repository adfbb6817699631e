"""The toolchain of the language "triton": Triton text to GPU binaries (no GPU needed), through a cache."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import linecache
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from llmc_runtime.format.install_command import install_command

from llmc.codegen import code_object, cubin
from llmc.codegen.kernel import Source
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.toolchain import (
    Compiled,
    Output,
    Progress,
    compile_error,
    digest,
    entry_path,
    read_entry,
    sweep,
    write_entry,
)
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

OPTIONS = ("num_warps", "num_stages")  # Triton ignores unknown names, so they are rejected here
BINARY: Mapping[str, str] = MappingProxyType({"cuda": "cubin", "hip": "hsaco"})
_MAX_QUOTED = 100  # characters of the line with the error that it quotes
_MAX_REASON = 400  # characters of the end of a message that an error shows
_CALLED = "\nin a function that it calls: "  # precedes the message about the called function


@dataclass(frozen=True)
class TritonToolchain:
    """Triton for one target. Equal text, parameters, options and version give the same key, and one compilation."""

    target: Target
    version: str
    name = "triton"

    @staticmethod
    def find(target: Target) -> TritonToolchain:
        """Return the toolchain of `target`; raises Diagnostic E501 if Triton is not installed."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return TritonToolchain(target, version("triton"))
        except PackageNotFoundError:
            cause = f"compiling for {target.name} needs Triton, which is not installed"
            remedy = f"{install_command('nvidia')} (no GPU is needed to compile)"
            raise Diagnostic("E501", cause, remedy) from None

    def key(self, source: Source) -> str:
        """Return a hash of all that the binary depends on: 32 hexadecimal digits."""
        fields: list[Any] = [source.text, source.entry, source.params, source.options, source.pdl, self.target.arch]
        fields += [self.version, *(["unfused"] if self.target.deterministic else [])]
        return digest(fields)

    @property
    def output(self) -> Output:
        """File suffixes of sources and binaries (cubin or hsaco), and the calling convention of the target's family."""
        return Output("py", BINARY[self.target.family], f"{self.target.family}-1")

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return entry_path(cache, key).is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile pairs (source, location) in up to `jobs` processes of their own; return key -> binary.

        Raises Diagnostic E502 for the first source that does not compile, E503 if a process is killed, E505 if a
        binary's parameters differ from those that its launches pass.
        """
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache)
        todo = {self.key(s): (s, loc) for s, loc in sources}
        read = {k: c for k in todo if (c := read_entry(entry_path(cache, k))) is not None}
        out = {k: c for k, c in read.items() if len(c.boxes) == len(todo[k][0].maps)}
        missing = {k: v for k, v in todo.items() if k not in out}
        done = len(out)
        for key, result in self._compile_all(missing, max(1, jobs)):
            source, loc = todo[key]
            if isinstance(result, str):
                saved = cache / f"{key}.failed.py"
                raise compile_error(f"Triton {self.version}", source, reason_of(result), saved, loc, result)
            self._check(source, result, loc)
            out[key] = result
            write_entry(entry_path(cache, key), result)
            done += 1
            if progress:
                progress(done, len(todo), source.entry)
        return out

    def _check(self, source: Source, compiled: Compiled, loc: str) -> None:
        """Compare a binary with its launches, which pass null for Triton's two scratch arguments."""
        if self.target.family == "cuda":
            cubin.check_launch(source, compiled.binary, loc, scratch=2)
        else:
            wavefront = self.target.limits.warp
            code_object.check_launch(source, compiled.binary, compiled.threads, wavefront, loc, scratch=2)

    def _compile_all(self, missing: Mapping[str, tuple[Source, str]], jobs: int) -> Any:
        """Yield (key, Compiled or an error message) of each source, in order.

        A process compiles for one target only: Triton 3.6 keeps the conversions of 8-bit floats of the first target
        that a process compiles for, and uses them for all others (fixed by https://github.com/triton-lang/triton/pull/9364).
        """
        if not missing:
            return
        work = [Job.of(k, s, self.target) for k, (s, _) in missing.items()]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(work)), mp_context=context, initializer=end_with_parent) as pool:
            try:
                yield from pool.map(compile_one, work)
            except BrokenProcessPool:
                cause = "a compiler process ended too soon: it was killed, or the main script has no main guard"
                remedy = "free memory and try again; in a script, compile under: if __name__ == '__main__':"
                raise Diagnostic("E503", cause, remedy) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def reason_of(message: str) -> str:
    """Return the reason in a message of Triton's compiler on one line: its kind, and what follows the quoted source.

    A message quotes the kernel up to the error, marks the place with ^ and ends with the reason. Of several, the last
    one has the reason: it is about the innermost function.
    """
    message = message.rpartition(_CALLED)[2]
    kind, _, rest = message.partition(":")
    lines = rest.splitlines()
    mark = max((i for i, line in enumerate(lines) if line.strip() == "^"), default=-1)
    end = " ".join(" ".join(lines[mark + 1 :]).split())
    place = f"{lines[mark - 1].strip()[:_MAX_QUOTED]!r}: " if mark > 0 else ""
    return f"{kind}: {place}{end[-_MAX_REASON:]}"


def message_of(error: Exception) -> str:
    """Return the messages of an error of Triton's compiler and of those that it wraps, one for each called function."""
    from triton.compiler.errors import CompilationError

    texts, inner = [f"{type(error).__name__}: {error}"], error.__cause__
    while isinstance(inner, CompilationError):
        texts.append(f"{type(inner).__name__}: {inner}")
        inner = inner.__cause__
    return _CALLED.join(texts)


def end_with_parent() -> None:
    """End this worker process when its parent ends, even if killed. Otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Job(NamedTuple):
    """A source to compile, and the facts about the target that the compiler needs.

    warp: threads of a warp or wavefront. fusion: whether a product may be fused into a sum, which rounds once instead
    of twice.
    """

    key: str
    source: Source
    family: str
    arch: str
    warp: int
    fusion: bool

    @classmethod
    def of(cls, key: str, source: Source, target: Target) -> Job:
        """Return the job of compiling a source for a target."""
        return cls(key, source, target.family, target.arch, target.limits.warp, not target.deterministic)


def compile_one(job: Job) -> tuple[str, Compiled | str]:
    """Compile one source in this process; return (key, Compiled or an error message)."""
    key, source, family, _, warp, _ = job
    from triton import knobs

    unknown = [k for k, _ in source.options if k not in OPTIONS]
    if unknown:
        return key, f"unknown option {unknown[0]!r}; known: {', '.join(OPTIONS)}"
    with scratch() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(folder)
        knobs.compilation.disable_line_info = True  # file names would make equal compiles differ
        try:
            built = _compiled(job)
        except Exception as e:  # Triton raises exceptions of many types; any means that the emitted text is wrong
            return key, message_of(e)
        meta = built.metadata
        if getattr(meta, "global_scratch_size", 0):
            return key, "the kernel needs global scratch memory, which launches do not provide"
        boxes = tuple((tuple(x["block_size"]), int(x["swizzle"])) for x in getattr(meta, "tensordesc_meta", None) or ())
        if len(boxes) != len(source.maps):
            return key, "the target does not support tensor maps"
        return key, Compiled(built.asm[BINARY[family]], meta.num_warps * warp, meta.shared, boxes)


def _compiled(job: Job) -> Any:
    """Compile one source with Triton, with all pointers aligned to 16 bytes; it raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, source, family, arch, warp, fusion = job
    fn = load_entry(source.text, source.entry)
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(source.params) if p.startswith("*")}
    ast = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, aligned)
    gpu = GPUTarget(family, int(arch.removeprefix("sm_")) if family == "cuda" else arch, warp)
    options = {"enable_fp_fusion": fusion, **dict(source.options)}
    if source.pdl:
        options["launch_pdl"] = True
    return triton.compile(ast, target=gpu, options=options)


class _Text(importlib.abc.InspectLoader):
    """A loader that imports a module from its text. Triton reads the text again through `linecache`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.text, f"<{fullname}>")


def load_entry(text: str, entry: str) -> Any:
    """Execute an emitted kernel text (never one from an artifact) and return its jitted function."""
    name = f"llmc_text_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(name, _Text(text))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(keepends=True), f"<{name}>")
    spec.loader.exec_module(module)
    return getattr(module, entry)
