"""Where compiled models are kept: found by what they were made of, built once by the compiler as a subprocess.

It compiles nothing itself and imports the standard library alone. An entry's key covers the contents of the source
files, the options, the machine where the target is "native", and the compiler's own files; never paths or times.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llmc_runtime.format.cache_key import artifact_key
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.signals import unwinding

MANIFEST = "manifest.json"
_TAIL = 5
_PATIENCE = 3.0  # seconds that a compiler has to end
_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)  # as llmc has it

Say = Callable[[str], None]


def default_root(environ: Mapping[str, str] | None = None) -> Path:
    """$LLMC_CACHE, else $XDG_CACHE_HOME/llmc, else ~/.cache/llmc; `environ` is the caller's, where it has one."""
    environ = environ or {}
    if environ.get("LLMC_CACHE"):
        return Path(environ["LLMC_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmc"


def is_artifact(path: Path) -> bool:
    """Whether a folder calls itself an artifact."""
    return (path / MANIFEST).is_file()


def compiled(source: Path, options: Mapping[str, str], root: Path, say: Say) -> Path:
    """The artifact made of the model folder `source`, compiled now if the cache has none.

    `options` are those of `llmc compile`, by name without dashes. `say` is told what happens. LlmcError E640 where the
    compiler is not installed, E641 where it fails, E642 where the cache cannot be written.
    """
    source = source.resolve()
    try:
        (root / "artifacts").mkdir(parents=True, exist_ok=True)
        key = artifact_key(source, options, root)
        entry = root / "artifacts" / f"{source.name[:40]}-{key[:32]}.llmc"
        if is_artifact(entry):
            say(f"using {entry}, compiled from {source}")
            return entry
        with _locked(root / "artifacts" / f".{entry.name}.lock", say), unwinding():
            if not is_artifact(entry):
                _build(source, options, root, entry, say)
    except OSError as e:
        raise _unusable(root, e) from e
    return entry


def _unusable(root: Path, e: OSError) -> LlmcError:
    cause = f"the cache {root} cannot be used: {e.strerror or e}"
    return LlmcError("E642", cause, "free space there, or name another folder")


def is_id(model: str | Path) -> bool:
    """Whether this means `owner/name` or `owner/name@revision` on a model hub: it is no path, nor one in a folder that
    is there, and is not called as artifacts are."""
    text = str(model)
    known = text.endswith(".llmc") or os.path.lexists(text.partition("/")[0])
    return _ID.fullmatch(text) is not None and not known


def fetched(name: str, options: Mapping[str, str], root: Path, say: Say) -> Path:
    """The artifact made of the hub's model `name`, an id. The compiler asks the hub which commit is meant, each time,
    and fetches and compiles what was not yet. LlmcError E640 to E642 as `compiled`."""
    require_compiler(f"there is no folder {name}, and a model of a hub has to be compiled")
    key = hashlib.sha256(json.dumps([name, sorted(options.items())]).encode()).hexdigest()
    entry = root / "artifacts" / f"{name.replace('/', '--').replace('@', '-')[:60]}-{key[:16]}.llmc"
    flags = " ".join(f"--{option} {value}" for option, value in options.items())
    say(f"{name} is a model of a hub; it is fetched and compiled where that was not done yet, into {entry}")
    say(f"the same by hand: llmc compile {name} -o model.llmc {flags}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f".{entry.name}.lock", say), unwinding():
            try:
                _run([sys.executable, *fetch_command(name, entry, options, root)], name)
            finally:
                _sweep(entry)
    except OSError as e:
        raise _unusable(root, e) from e
    return entry


def fetch_command(name: str, output: Path, options: Mapping[str, str], root: Path) -> list[str]:
    """The interpreter's arguments that fetch and compile `name` into `output`, or link what the cache has of it."""
    flags = [text for option, value in options.items() for text in (f"--{option}", value)]
    kept = ["--cache", str(root), "--force", "--json"]
    return ["-P", "-m", "llmc.cli", "compile", name, "-o", str(output), *flags, *kept]


def compile_command(source: Path, output: Path, options: Mapping[str, str], root: Path) -> list[str]:
    """The interpreter's arguments that compile `source` into `output`; -P: the working directory is no package."""
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    kept = ["--cache", str(root), "--no-reuse", "--json"]
    return ["-P", "-m", "llmc.cli", "compile", str(source), "-o", str(output), *flags, *kept]


def _build(source: Path, options: Mapping[str, str], root: Path, entry: Path, say: Say) -> None:
    """Compile beside the entry and rename: a build that is ended leaves nothing, a killed one nothing that opens. The
    caller holds the lock."""
    _sweep(entry)
    require_compiler()
    partial = entry.parent / f".{entry.name}.{os.getpid()}.tmp"
    by_hand = " ".join(f"--{name} {value}" for name, value in options.items())
    say(f"{source} is not compiled yet; compiling it into {entry} (once)")
    say(f"the same by hand: llmc compile {source} -o model.llmc {by_hand}")
    try:
        _run([sys.executable, *compile_command(source, partial, options, root)], source)
        if entry.exists():
            shutil.rmtree(entry)
        os.rename(partial, entry)
    finally:
        _sweep(entry)


def _sweep(entry: Path) -> None:
    """Remove what builds of the entry wrote, and what their compilers had begun beside that."""
    name = glob.escape(entry.name)
    for pattern in (f".{name}.*.tmp", f"..{name}.*.tmp.tmp-*", f".{name}.tmp-*"):
        for path in entry.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def require_compiler(why: str = "the model is not compiled") -> None:
    """LlmcError E640 unless the compiler and what it needs are installed here; nothing is imported."""
    lacking = [name for name in ("llmc", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        raise LlmcError(
            "E640",
            f"{why}, and the compiler is not installed here ({', '.join(lacking)} missing)",
            "pip install 'llmc-aot[compile]', or compile elsewhere (llmc compile MODEL -o model.llmc) and open that",
        )


def _run(command: Sequence[str], source: Path | str) -> None:
    """Run the compiler, its progress to our stderr line by line; whatever ends us ends it first. LlmcError E641 with
    its own error if it fails."""
    tail: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,  # the summary: it names a folder that is about to be renamed
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        process_group=0,  # with all that it starts
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            _pass_on(line)
            tail = [*tail[1 - _TAIL :], line.rstrip()]
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if code:
        said = next((line for line in reversed(tail) if line.startswith("LLMC-E")), "")
        raise LlmcError(
            "E641",
            f"compiling {source} failed with exit code {code}" + (f": {said}" if said else ""),
            "see the compiler's lines above; llmc compile MODEL -o DIR -v shows more",
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End the compiler and all that it started; what is there after its time is killed."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=_PATIENCE)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _pass_on(line: str) -> None:
    """To stderr, where somebody reads it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(line)


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is compiling this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
