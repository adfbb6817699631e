"""The runtime with only the packages of a plain install: without torch, Triton and transformers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from llmc_runtime.format.errors import EXTRAS, as_llmc_error

ROOT = Path(__file__).resolve().parent.parent
ABSENT = ("torch", "triton", "transformers", "safetensors", "ml_dtypes", "pytest", "llmc", "zmq", "msgspec")

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib, importlib.util, pkgutil
for name in {absent}:
    assert importlib.util.find_spec(name) is None, name
import llmc_runtime
names = [m.name for m in pkgutil.walk_packages(llmc_runtime.__path__, "llmc_runtime.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:  # the extra "serve"
        of_server = ("engine.", "api.async", "server.", "call_formats", "exec.group_", "exec.rank", "exec.ray_")
        if not name.removeprefix("llmc_runtime.").startswith(of_server):
            raise ImportError(name) from e
from llmc_runtime.format.errors import LlmcError
try:
    llmc_runtime.AsyncLLM
    raise SystemExit("AsyncLLM came without its packages")
except LlmcError as e:
    assert e.code == "E665", e
print(len(names), "modules")
from llmc_runtime.cli import main_run
sys.exit(main_run(["--help"]))
"""


def plain_install() -> set[str]:
    """Names of the distributions that the plain install brings, from metadata."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    work, found = list(wanted), set()
    while work:
        text = work.pop()
        name = re.split(r"[\s;<>=!~\[(]", text, maxsplit=1)[0].lower().replace("_", "-")
        if name in found or "extra ==" in text:
            continue
        try:
            work += distribution(name).requires or []
        except PackageNotFoundError:  # an optional or another platform's requirement
            continue
        found.add(name)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to the files of those distributions and to the runtime."""
    folder = tmp_path_factory.mktemp("site")
    for name in plain_install():
        d = distribution(name)
        tops = {f.parts[0] for f in d.files or [] if f.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(d.locate_file(top))))
    (folder / "llmc_runtime").symlink_to(ROOT / "runtime" / "llmc_runtime")
    return folder


def test_every_module_imports_and_the_command_answers(site: Path) -> None:
    program = PROGRAM.format(absent=repr(ABSENT))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(site)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert " modules" in done.stdout
    assert "usage" in done.stdout.lower()


def test_the_room_is_really_bare(site: Path) -> None:
    """The test above can fail: importing torch there does."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); import torch"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "No module named 'torch'" in done.stderr


@pytest.fixture(scope="module")
def plain(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain install as pip makes it: the same wheel has the compiler, whose dependencies are an extra."""
    folder = tmp_path_factory.mktemp("plain")
    for entry in (*site.iterdir(), ROOT / "llmc"):
        (folder / entry.name).symlink_to(entry.resolve())
    return folder


MODEL = str(ROOT / "examples" / "demo-model")


@pytest.mark.parametrize(
    "argv",
    [
        ["compile", MODEL, "-o", "x.llmc", "--no-cache"],
        ["compile", MODEL, "--dry-run", "--no-cache"],
        ["compile", "owner/name", "-o", "x.llmc"],
        ["quantize", MODEL, "out", "--scheme", "int8"],
        ["roofline", MODEL],
        ["tune", MODEL, "--no-cache"],
        ["pack", "x.llmc", MODEL],
        ["run", MODEL, "--prompt", "a"],
    ],
    ids=" ".join,
)
def test_commands_that_need_the_compiler_say_what_to_install(argv: list[str], plain: Path, tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from llmc.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(plain), *argv],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={"LLMC_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("LLMC-E") == 1
    assert "LLMC-E640: " in done.stderr
    assert "pip install" in done.stderr and "[compile]'" in done.stderr


@pytest.mark.parametrize(
    "module, code", [("torch.nn", "E640"), ("msgspec", "E665"), ("llguidance", "E650"), ("opentelemetry.sdk", "E665")]
)
def test_a_module_of_an_extra_is_no_bug(module: str, code: str) -> None:
    error = as_llmc_error(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert error.code == code
    assert as_llmc_error(ModuleNotFoundError("No module named 'nothing'", name="nothing")).code == "E000"


def test_extras_are_those_of_the_install() -> None:
    """Every module that `EXTRAS` names belongs to a requirement of that extra in pyproject.toml."""
    spelled = {"zmq": "pyzmq", "yaml": "pyyaml"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[<>=;\[ ]", text, maxsplit=1)[0].replace("-", "_") for text in declared[extra]}
        # OpenTelemetry's distributions share a namespace package.
        assert {spelled.get(m, m) for m in modules} == {re.sub("opentelemetry_.*", "opentelemetry", n) for n in names}


def test_both_packages_are_typed() -> None:
    for package in (ROOT / "llmc", ROOT / "runtime" / "llmc_runtime"):
        assert (package / "py.typed").is_file()
