"""How packages extend the compiler.

A package names its `Extension` under the entry-point group `llmc.extensions`. Every value is a "module:object" text
that is imported when the name is first looked up; importing a package registers nothing. If two packages provide the
same name, loading raises an error, so the order of installation never matters.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.targets.cpu_targets import with_features
from llmc.targets.target import Target

GROUP = "llmc.extensions"
BUILTIN = "llmc.builtin:EXTENSION"
EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Extension:
    """The contributions of one package: for each kind, a mapping from names to "module:object" texts.

    ops: `OpDef` objects. passes: `Pass` classes. kernels: `Kernel` objects. toolchains: for each kernel language, a
    function of a `Target` that returns its `Toolchain`. targets: functions without parameters that return a `Target`.
    schemes: quantisation schemes. pipelines: pipeline texts (not imported).
    """

    name: str
    ops: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    passes: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    kernels: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    toolchains: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    targets: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    schemes: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    pipelines: Mapping[str, str] = field(default_factory=lambda: EMPTY)


KINDS = tuple(f.name for f in fields(Extension) if f.name != "name")


def _singular(kind: str) -> str:
    """The singular of a kind."""
    return "pass" if kind == "passes" else kind.removesuffix("s")


def resolve(text: str, what: str = "") -> Any:
    """Import the object that "module:object" names; raises Diagnostic E423, whose message starts with `what`."""
    module, _, name = text.partition(":")
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value
    except (ImportError, AttributeError, ValueError) as e:
        head = f"{what}: " if what else ""
        raise Diagnostic(
            "E423",
            f"{head}{text!r} cannot be loaded: {e}",
            "use the form module:object, and check that the module can be imported",
        ) from e


class Contributions(Mapping[str, Any]):
    """All names of one kind; looking one up imports its object. llmc's own come first, then packages by name."""

    def __init__(self, kind: str, texts: Mapping[str, str], literal: bool = False) -> None:
        """Take the texts of one kind; `literal` texts are returned as they are instead of imported."""
        self.kind, self.texts, self.literal = kind, texts, literal

    def __getitem__(self, name: str) -> Any:
        """Import and return the object; raises KeyError for an unknown name, Diagnostic E423 if the import fails."""
        text = self.texts[name]
        return text if self.literal else resolve(text, f"{self.kind} {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self.texts

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Registry:
    """The contributions of all extensions, by kind. Immutable."""

    ops: Contributions
    passes: Contributions
    kernels: Contributions
    toolchains: Contributions
    targets: Contributions
    schemes: Contributions
    pipelines: Contributions
    extensions: tuple[Extension, ...]

    def opset(self) -> Mapping[str, Any]:
        """Return all ops by name; raises Diagnostic E422 if an extension redefines a built-in op."""
        from llmc.ir.ops import OPS

        if clash := [n for n in self.ops if n in OPS]:
            raise _clash("op", clash[0], "llmc", next(e.name for e in self.extensions if clash[0] in e.ops))
        return MappingProxyType({**OPS, **self.ops}) if self.ops else OPS

    def target(self, name: str) -> Target:
        """Return the target of a name such as "cuda:sm_90" or "cpu:x86-64-v4+avx512_bf16"; raises Diagnostic E510."""
        base, *features = name.split("+")
        if base not in self.targets:
            cause = f"unknown target {base!r}; known: {', '.join(self.targets)}"
            raise Diagnostic("E510", cause, f"choose one of them, for example --target {next(iter(self.targets))}")
        return with_features(self.targets[base](), features)

    def pipelines_for(self, target: Target) -> Mapping[str, str]:
        """Return the named pipelines; "serve" is the target's."""
        return {**self.pipelines, "serve": target.pipeline}


def _clash(kind: str, name: str, first: str, second: str) -> Diagnostic:
    cause = f"{kind} {name!r} is provided by both {first} and {second}"
    return Diagnostic("E422", cause, f"uninstall one of them, or rename it in {second}")


def combine(extensions: Iterable[Extension]) -> Registry:
    """Merge extensions into one registry; raises Diagnostic E422 if two provide the same name of a kind."""
    members = tuple(extensions)
    contributions = {}
    for kind in KINDS:
        texts: dict[str, str] = {}
        owner: dict[str, str] = {}
        for e in members:
            for name, text in getattr(e, kind).items():
                if name in texts:
                    raise _clash(_singular(kind), name, owner[name], e.name)
                texts[name], owner[name] = text, e.name
        contributions[kind] = Contributions(_singular(kind), MappingProxyType(texts), literal=kind == "pipelines")
    return Registry(**contributions, extensions=members)


def load(more: Iterable[Extension] = ()) -> Registry:
    """Return the registry of llmc's own extension, the installed packages' and `more` (for tests and notebooks)."""
    from importlib.metadata import entry_points

    points = {p.value: p for p in entry_points(group=GROUP)}
    points.pop(BUILTIN, None)
    values = [BUILTIN, *(v for v, p in sorted(points.items(), key=lambda item: item[1].name))]
    extensions = []
    for value in values:
        extension = resolve(value, "extension")
        if not isinstance(extension, Extension):
            raise Diagnostic(
                "E423", f"extension {value!r} is not an Extension", "make it an instance of llmc.extension.Extension"
            )
        extensions.append(extension)
    return combine([*extensions, *more])
