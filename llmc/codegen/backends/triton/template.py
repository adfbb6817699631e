"""Renders template kernels: modules under `kernels/`, read as text, become part of self-contained kernel texts.

A template module holds `@triton.jit` functions, constants, and classes of NamedTuple, which group values that functions
pass to each other. It may import names from other template modules, one by one and without `as`, and constants of the
runtime (`CONSTANTS`), which are printed as their values. A package outside llmc may have template modules of its own.
Rendering a function yields the definitions that it needs, its own and imported, in an order in which Python can execute
them. Comments and docstrings are kept.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

FOLDER = Path(__file__).parent / "kernels"
PACKAGE = "llmc.codegen.backends.triton.kernels"
PUBLIC = "llmc.extend.device_functions"  # re-exports functions of PACKAGE to templates of other packages
# Prefixes of the modules whose constants templates may import.
CONSTANTS = ("llmc_runtime.format.", "llmc_runtime.sched.row_columns")
NAMED_TUPLE = "from typing import NamedTuple"  # the import of rendered texts that have classes
# Text is an expression of the entry function; the others are literals.
Argument: TypeAlias = "str | int | float | tuple[Argument, ...] | None"


@dataclass(frozen=True)
class Definition:
    """A function, class or constant at the top level of a template module.

    `needs` lists the definitions that it refers to, as (module, name). `params` and `optional` name the parameters of
    a function and those that have defaults.
    """

    text: str
    needs: tuple[tuple[str, str], ...]
    params: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    is_class: bool = False


@dataclass(frozen=True)
class Module:
    """A template module: its docstring, and its definitions in the order of the file."""

    name: str
    doc: str
    definitions: Mapping[str, Definition]
    imports: tuple[str, ...]  # template modules


@dataclass(frozen=True)
class Template:
    """The function `function` of the template module `module`.

    A module is named "gemm" if it is `kernels/gemm.py`, and "package.module" if another package has it.
    """

    module: str
    function: str

    def text(self) -> str:
        """Return the function and all definitions that it needs, each module under a comment with its docstring.

        Raises ValueError if two modules define the same name.
        """
        needed = set(_closure(self.module, self.function))
        names = sorted(name for _, name in needed)
        if duplicates := [a for a, b in pairwise(names) if a == b]:
            raise ValueError(f"template {self.module}: two modules define {duplicates[0]}")
        parts = [NAMED_TUPLE] if any(load(m).definitions[name].is_class for m, name in needed) else []
        for module in _ordered(self.module):
            texts = [d.text for name, d in module.definitions.items() if (module.name, name) in needed]
            if texts:
                parts.append("\n\n\n".join([_heading(module), *texts]))
        return "\n\n\n".join(parts)

    def call(self, **arguments: Argument) -> str:
        """Return a call of the function with named arguments, one per line.

        Raises ValueError if a parameter without a default is missing, or if the function has no such parameter.
        """
        definition = load(self.module).definitions[self.function]
        missing = [p for p in definition.params if p not in arguments and p not in definition.optional]
        unknown = [a for a in arguments if a not in definition.params]
        if missing or unknown:
            raise ValueError(f"{self.module}.{self.function}: missing arguments {missing}, unknown arguments {unknown}")
        lines = [f"    {p}={literal(arguments[p])},\n" for p in definition.params if p in arguments]
        return f"{self.function}(\n{''.join(lines)})"


def literal(value: Argument) -> str:
    """Print an argument: text unchanged, numbers and None as literals, tuples element by element."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no literal in Triton")
    return repr(value)


def record(name: str, **fields: Argument) -> str:
    """Return the expression of a NamedTuple of a template module, as an argument of its entry function."""
    return f"{name}({', '.join(f'{field}={literal(value)}' for field, value in fields.items())})"


def function(signature: str, doc: str, lines: Sequence[str]) -> str:
    """Print a generated Triton function, such as an epilogue that is passed to a template."""
    body = "\n".join(f"    {x}" for x in lines)
    return f'@triton.jit\ndef {signature}:\n    """{doc}"""\n{body}'


@cache
def load(name: str) -> Module:
    """Parse the template module `name` without importing it.

    Raises ValueError if there is no such module, or at a statement that a template module may not contain.
    """
    path = _path(name)
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, str(path))
    imported: dict[str, tuple[str, str]] = {}  # name -> (template module, name in it)
    constants: dict[str, Any] = {}  # values of names that are imported from modules of constants
    nodes: dict[str, ast.stmt] = {}
    for statement in tree.body:
        match statement:
            case ast.ImportFrom(module=str(module)) if _template_name(module, name):
                imported |= _imported_functions(statement, _template_name(module, name), path)
            case ast.ImportFrom(module=str(module)) if module.startswith(CONSTANTS):
                constants |= {a.name: getattr(import_module(module), a.name) for a in statement.names}
            case (
                ast.FunctionDef(name=defined)
                | ast.ClassDef(name=defined, bases=[ast.Name(id="NamedTuple")])
                | ast.Assign(targets=[ast.Name(id=defined), *_])
            ):
                nodes[defined] = statement
            case ast.Import() | ast.Expr() | ast.ImportFrom(module="typing", names=[ast.alias(name="NamedTuple")]):
                pass
            case _:
                where = f"{path.name}:{statement.lineno}"
                raise ValueError(f"{where}: a template holds functions, classes of NamedTuple, constants and imports")
    known = {**imported, **{n: (name, n) for n in nodes}}
    lines = source.splitlines()
    definitions = {n: _definition(n, node, lines, known, constants) for n, node in nodes.items()}
    modules = tuple(dict.fromkeys(m for m, _ in imported.values()))
    return Module(name, ast.get_docstring(tree) or "", MappingProxyType(definitions), modules)


def _imported_functions(statement: ast.ImportFrom, module: str, path: Path) -> dict[str, tuple[str, str]]:
    """Return (template module, name) of each name that is imported; raises ValueError for `as`."""
    if any(a.asname for a in statement.names):
        raise ValueError(f"{path.name}:{statement.lineno}: templates import each other without `as`")
    return {a.name: (_public_module(a.name) if module == PUBLIC else module, a.name) for a in statement.names}


def _path(name: str) -> Path:
    """Return the file of a template module, which is found without importing the module itself."""
    if "." not in name:
        return FOLDER / f"{name}.py"
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"template {name}: there is no such module")
    return Path(spec.origin)


def _template_name(imported: str, by: str) -> str:
    """Return the template module that `imported` names; "" if neither llmc nor the package of template `by` has it."""
    if imported == PUBLIC:
        return PUBLIC
    if imported.startswith(f"{PACKAGE}."):
        return imported.removeprefix(f"{PACKAGE}.")
    return imported if "." in by and imported.startswith(by.partition(".")[0] + ".") else ""


def _public_module(name: str) -> str:
    """Return the template module that defines a public device function. Raises ValueError if there is none."""
    for statement in ast.parse(_path(PUBLIC).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and name in [a.name for a in statement.names]:
            return _template_name(statement.module or "", PUBLIC)
    raise ValueError(f"{PUBLIC} has no function {name!r}")


def _definition(
    name: str, node: ast.stmt, lines: list[str], known: Mapping[str, tuple[str, str]], declared: Mapping[str, Any]
) -> Definition:
    """Return one definition, with its decorators and the comment lines directly above it."""
    first = min(d.lineno for d in (node, *getattr(node, "decorator_list", ())))
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id != name}
    needs = tuple(known[n] for n in sorted(used & known.keys()))
    text = "\n".join(lines[first - 1 : node.end_lineno])
    if not isinstance(node, ast.FunctionDef):
        return Definition(_with_values(text, node, declared), needs, is_class=isinstance(node, ast.ClassDef))
    params = tuple(a.arg for a in node.args.args)
    return Definition(text, needs, params, frozenset(params[len(params) - len(node.args.defaults) :]))


def _with_values(text: str, node: ast.stmt, declared: Mapping[str, Any]) -> str:
    """Return the text of a constant. Declared numbers and places in declared tuples (`N.index("x")`) become numbers."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="index"), args=[ast.Constant(value=entry)]):
                value = declared[name].index(entry) if name in declared else None
            case ast.Name(id=name) if isinstance(declared.get(name), int):
                value = declared[name]
            case _:
                continue
        if value is not None:
            text = text.replace(ast.unparse(part).replace("'", '"'), str(value), 1)
    return text


def _closure(module: str, name: str) -> Iterator[tuple[str, str]]:
    """(module, name) of a definition and of everything that it needs."""
    todo, seen = [(module, name)], set()
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            yield at
            todo += load(at[0]).definitions[at[1]].needs


def _ordered(name: str) -> list[Module]:
    """Return the module and its imports, direct and indirect, in topological order: a module follows its imports."""
    modules: dict[str, Module] = {}

    def visit(at: str) -> None:
        if at in modules:
            return
        module = load(at)
        for m in module.imports:
            visit(m)
        modules[at] = module

    visit(name)
    return list(modules.values())


def _heading(module: Module) -> str:
    """Return the module's name and docstring as comments."""
    lines = [module.name if "." in module.name else f"kernels/{module.name}.py", *module.doc.splitlines()]
    return "\n".join(f"# {line}".rstrip() for line in lines)
