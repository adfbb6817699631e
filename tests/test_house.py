"""The project's rules as tests: sizes of files and functions, access to the environment, forbidden imports."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "llmc", ROOT / "runtime" / "llmc_runtime")
SOURCES = tuple(sorted(p for room in PACKAGES for p in room.rglob("*.py")))
FILE_LINES, FUNCTION_LINES, FUNCTION_P90 = 400, 60, 30
CLIS = (ROOT / "llmc" / "cli.py", ROOT / "runtime" / "llmc_runtime" / "cli.py")
MUTABLE_CALLS = frozenset({"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter"})
UNSAFE_MODULES = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})
UNSAFE_CALLS = frozenset({"eval", "exec", "__import__"})
# Paths of one machine, and words about who or what wrote the project, have no place in it.
STRANGE = re.compile(
    r"/(?:home|root|work|opt|tmp)/\w|(?<!==)\b(?:10|192\.168)\.\d+\.\d+\.\d+\b"  # ==10.1.2.3 is a version
    r"|\b(?:chat\s?gpt|claude|anthropic|sub-?agents?|copilot)\b",
    re.I,
)
# The name of an API that the server implements, and its clients in the tests, are no such words.
API_NAME = "Anthropic's Messages API"
API_CLIENTS = "tests/clients/"


@cache
def parsed() -> Sequence[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(), str(path))) for path in SOURCES]


@cache
def walked() -> Sequence[tuple[Path, Sequence[ast.AST]]]:
    """The nodes of each file that a rule is about."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Attribute, ast.Import, ast.ImportFrom, ast.Call)
    return [(path, [node for node in ast.walk(tree) if isinstance(node, kinds)]) for path, tree in parsed()]


def functions() -> Iterator[tuple[str, int]]:
    for path, nodes in walked():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1


def offenders(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_a_file_has_at_most_400_lines() -> None:
    headers = [p for room in PACKAGES for pattern in ("*.h", "*.cpp", "*.cu") for p in room.rglob(pattern)]
    tests = list((ROOT / "tests").rglob("*.py"))
    sizes = {p: len(p.read_text().splitlines()) for p in (*SOURCES, *headers, *tests)}
    offenders([f"{p.relative_to(ROOT)}: {n} lines" for p, n in sizes.items() if n > FILE_LINES])


def test_a_function_has_at_most_60_lines_and_nine_in_ten_at_most_30() -> None:
    found = list(functions())
    offenders([f"{name}: {n} lines" for name, n in found if n > FUNCTION_LINES])
    lengths = sorted(n for _, n in found)
    if lengths:
        assert lengths[int(0.9 * (len(lengths) - 1))] <= FUNCTION_P90


def test_only_the_command_lines_read_the_environment() -> None:
    def reads(nodes: Sequence[ast.AST]) -> Iterator[int]:
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                yield node.lineno
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                yield from (node.lineno for a in node.names if a.name in ("environ", "getenv"))

    inner = [(p, nodes) for p, nodes in walked() if p not in CLIS]
    offenders([f"{p.relative_to(ROOT)}:{line} reads the environment" for p, nodes in inner for line in reads(nodes)])


def mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        return name in MUTABLE_CALLS
    return False


def test_no_module_holds_a_mutable_registry() -> None:
    found = []
    for path, tree in parsed():
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not mutable(node.value):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            if names != ["__all__"]:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {', '.join(names)} can change: freeze it")
    offenders(found)


def test_nothing_read_is_executed() -> None:
    found = []
    for path, nodes in walked():
        for node in nodes:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            found += [f"{where} imports {m}" for m in modules if m.split(".")[0] in UNSAFE_MODULES]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                found.append(f"{where} calls {node.func.id}")
    offenders(found)


def test_every_module_says_what_it_is() -> None:
    offenders([f"{p.relative_to(ROOT)} has no docstring" for p, t in parsed() if t.body and not ast.get_docstring(t)])


def test_no_words_about_machines() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path == Path(__file__).resolve() or not path.is_file() or path.stat().st_size > 1 << 20:
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for i, line in enumerate(lines, 1):
            match = STRANGE.search(line.replace(API_NAME, ""))
            if match and not (name.startswith(API_CLIENTS) and match[0].lower() == "anthropic"):
                found.append(f"{name}:{i}: {match[0]}")
    offenders(found)
