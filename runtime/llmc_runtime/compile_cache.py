"""The cache of compiled models: each is built once, by the compiler in a subprocess.

An entry's key covers the contents of the source files, the options, the compiler's own files and, for the target
"native", the machine; never paths or times. The compiler need not be installed to use an entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
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
from llmc_runtime.format.errors import LlmcError, require_compiler
from llmc_runtime.format.names import is_artifact
from llmc_runtime.signals import unwinding

_NUM_LAST_LINES = 5  # last lines of the compiler's output to search for its error
_STOP_SECONDS = 3.0  # seconds for the compiler to exit after SIGTERM
_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)  # as in llmc

Say = Callable[[str], None]


def default_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return $LLMC_CACHE, else $XDG_CACHE_HOME/llmc, else ~/.cache/llmc. `environ` holds the variables."""
    environ = environ or {}
    if environ.get("LLMC_CACHE"):
        return Path(environ["LLMC_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmc"


def is_source(path: Path) -> bool:
    """Whether a folder is a Hugging Face model: it has a config.json."""
    return (path / "config.json").is_file()


def compiled(source: Path, options: Mapping[str, str], root: Path, say: Say) -> Path:
    """Return the artifact for the model folder `source`, compiling it if the cache has none.

    `options` are those of `llmc compile`, by name without dashes, with "" for a switch; `say` is called with log lines.
    Raises LlmcError E640 if the compiler is not installed, E641 if it fails, E642 if the cache cannot be written.
    """
    source = source.resolve()
    try:
        (root / "artifacts").mkdir(parents=True, exist_ok=True)
        key = _key(source, options, root)
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


def _key(source: Path, options: Mapping[str, str], root: Path) -> str:
    """Return the key of a compilation, which covers the files of a draft model or head in a folder, too."""
    key, draft = artifact_key(source, options, root), options.get("draft", "")
    folder = Path(draft.removeprefix("eagle:"))
    if draft and is_source(folder):
        key = hashlib.sha256(f"{key} {artifact_key(folder.resolve(), {}, root)}".encode()).hexdigest()
    return key


def _unusable(root: Path, e: OSError) -> LlmcError:
    cause = f"the cache {root} cannot be used: {e.strerror or e}"
    return LlmcError("E642", cause, "free space there, or choose another folder")


def is_id(model: str | Path) -> bool:
    """Whether `model` means `owner/name` or `owner/name@revision` on a model hub: it is not a path below an existing
    folder and does not end in .llmc."""
    text = str(model)
    known = text.endswith(".llmc") or os.path.lexists(text.partition("/")[0])
    return _ID.fullmatch(text) is not None and not known


def fetched(name: str, options: Mapping[str, str], root: Path, say: Say) -> Path:
    """Return the artifact for the model `name` of a hub. Raises LlmcError E640 to E642 as `compiled` does.

    Each time the compiler looks up the revision's commit, and downloads and compiles it if the cache lacks it.
    """
    require_compiler(f"there is no folder {name}, and a model of a hub has to be compiled")
    key = hashlib.sha256(json.dumps([name, sorted(options.items())]).encode()).hexdigest()
    entry = root / "artifacts" / f"{name.replace('/', '--').replace('@', '-')[:60]}-{key[:16]}.llmc"
    say(f"{name} is a model of a hub; downloading and compiling it into {entry}, unless it is up to date")
    _say_command(name, options, say)
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
    """Return the interpreter's arguments that download `name` and compile it into `output`, or link a cached result."""
    return _command(name, output, options, root, "--force")


def compile_command(source: Path, output: Path, options: Mapping[str, str], root: Path) -> list[str]:
    """Return the interpreter's arguments that compile `source` into `output`, or link it from an equal compile."""
    return _command(str(source), output, options, root)


def _command(model: str, output: Path, options: Mapping[str, str], root: Path, *more: str) -> list[str]:
    flags = [text for name, value in options.items() for text in (f"--{name}", value) if text]
    # -P: modules are not imported from the working directory
    compiler = ["-P", "-m", "llmc.cli", "compile", model, "-o", str(output)]
    return [*compiler, *flags, "--cache", str(root), *more, "--json"]


def _say_command(model: str | Path, options: Mapping[str, str], say: Say) -> None:
    flags = " ".join(f"--{name} {value}".rstrip() for name, value in options.items())
    say(f"the same as a command: llmc compile {model} -o model.llmc {flags}")


def _build(source: Path, options: Mapping[str, str], root: Path, entry: Path, say: Say) -> None:
    """Compile into a folder next to the entry, then rename it. The caller holds the lock.

    A build that is interrupted leaves no files; one that is killed leaves no artifact that opens.
    """
    _sweep(entry)
    require_compiler("the model is not compiled")
    partial = entry.parent / f".{entry.name}.{os.getpid()}.tmp"
    say(f"{source} is not compiled yet; compiling it into {entry} (once)")
    _say_command(source, options, say)
    try:
        _run([sys.executable, *compile_command(source, partial, options, root)], source)
        if entry.exists():
            shutil.rmtree(entry)
        os.rename(partial, entry)
    finally:
        _sweep(entry)


def _sweep(entry: Path) -> None:
    """Remove the unfinished files of builds of the entry, and those of their compilers."""
    name = glob.escape(entry.name)
    for pattern in (f".{name}.*.tmp", f"..{name}.*.tmp.tmp-*", f".{name}.tmp-*"):
        for path in entry.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _run(command: Sequence[str], source: Path | str) -> None:
    """Run the compiler and copy its stderr to ours line by line. An exception in this process stops the compiler.

    Raises LlmcError E641 with the compiler's error if it fails.
    """
    tail: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,  # the summary names a folder that will be renamed
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        process_group=0,  # to stop its child processes, too
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            _print(line)
            tail = [*tail[1 - _NUM_LAST_LINES :], line.rstrip()]
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if code:
        error = next((line for line in reversed(tail) if line.startswith("LLMC-E")), "")
        raise LlmcError(
            "E641",
            f"compiling {source} failed with exit code {code}" + (f": {error}" if error else ""),
            "see the compiler's lines above; llmc compile MODEL -o DIR -v shows more",
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the compiler and its child processes, and kill them after _STOP_SECONDS."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=_STOP_SECONDS)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _print(line: str) -> None:
    """Write a line to stderr, unless that is closed."""
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
