"""Extensions: the interface by which packages add passes, ops, kernels, targets and more to the compiler.

A package names its `Extension` under the entry-point group `llmc.extensions`. Every value is a "module:object" text
that is imported when the name is first looked up; importing a package registers nothing. If two packages provide the
same name, loading raises an error, so the order of installation never matters.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType, TracebackType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.nearest import did_you_mean

from llmc.diagnostics import Diagnostic, extension_code, extension_error
from llmc.targets.cpu_targets import with_features
from llmc.targets.target import Target, check_record

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
    """Return the singular of a kind."""
    return "pass" if kind == "passes" else kind.removesuffix("s")


def resolve(text: str, subject: str = "") -> Any:
    """Import the object that "module:object" names; raises Diagnostic E423, whose message starts with `subject`."""
    module, _, name = text.partition(":")
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value
    except LlmcError:
        raise
    except Exception as e:
        head = f"{subject}: " if subject else ""
        if isinstance(e, ImportError | AttributeError | ValueError):
            reason, remedy = str(e), "use the form module:object, and check that the module can be imported"
        else:
            reason, remedy = f"{type(e).__name__}: {e}", f"correct the module {module}"
        raise Diagnostic("E423", f"{head}{text!r} cannot be loaded: {reason}", remedy) from e


def _check(kind: str, name: str, value: Any) -> None:
    """Raise Diagnostic E423 unless an object is of its kind, and has the name under which it is offered."""
    whole = f"{kind} {name!r}"
    if kind not in _CLASSES:
        if not callable(value):
            raise Diagnostic("E423", f"{whole} is {value!r:.80}, not a function", "name a function")
        return
    base = resolve(_CLASSES[kind])
    fits = isinstance(value, type) and issubclass(value, base) if kind == "pass" else isinstance(value, base)
    if not fits:
        expected = "a subclass" if kind == "pass" else "an instance"
        cause = f"{whole} is {value!r:.80}, not {expected} of {base.__module__}.{base.__name__}"
        raise Diagnostic("E423", cause, "correct the extension")
    if kind == "pass" and not is_dataclass(value):
        raise Diagnostic("E423", f"{whole} is not a dataclass", "decorate the class with @dataclass(frozen=True)")
    if (actual := getattr(value, "name", None)) != name:
        raise Diagnostic("E423", f"{whole} has the name {actual!r}", f"register it as {actual!r}, or correct its name")


# kind -> module and class of its objects; other kinds are functions. Imported when an object is looked up.
_CLASSES: Mapping[str, str] = MappingProxyType(
    {"op": "llmc.ir.opdef:OpDef", "pass": "llmc.passes.base:Pass", "kernel": "llmc.codegen.kernel:Kernel"}
)


class Contributions(Mapping[str, Any]):
    """All names of one kind; looking one up imports its object. llmc's own come first, then packages by name."""

    def __init__(self, kind: str, texts: Mapping[str, str], literal: bool = False) -> None:
        """Take the texts of one kind; `literal` texts are returned unchanged instead of imported."""
        self.kind, self.texts, self.literal = kind, texts, literal

    def __getitem__(self, name: str) -> Any:
        """Import and return the object.

        Raises KeyError for an unknown name, and Diagnostic E423 if the import fails or gives something else.
        """
        text = self.texts[name]
        if self.literal:
            return text
        value = resolve(text, f"{self.kind} {name!r}")
        _check(self.kind, name, value)
        return value

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
    versions: Mapping[str, str] = field(default_factory=lambda: EMPTY)  # extension -> version of its package
    points: Mapping[str, str] = field(default_factory=lambda: EMPTY)  # value of an entry point -> extension

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
            example = f"choose one of them, for example --target {next(iter(self.targets))}"
            raise Diagnostic("E510", cause, did_you_mean(base, self.targets, example))
        make = self.targets[base]
        with extension_code(f"target {base!r}", make):
            target = make()
            if not isinstance(target, Target):
                raise TypeError(f"it returned {target!r:.80}, not a Target")
            check_record(target, base)
        return with_features(target, features)

    def pipelines_for(self, target: Target) -> Mapping[str, str]:
        """Return the named pipelines; "serve" is the target's."""
        return {**self.pipelines, "serve": target.pipeline}


def _clash(kind: str, name: str, first: str, second: str) -> Diagnostic:
    cause = f"{kind} {name!r} is provided by both {first} and {second}"
    return Diagnostic("E422", cause, f"uninstall one of them, or rename it in {second}")


def _check_texts(e: Extension) -> None:
    """Raise Diagnostic E423 unless each kind maps names to texts."""
    for kind in KINDS:
        texts = getattr(e, kind)
        wrong = [texts] if not isinstance(texts, Mapping) else [v for v in texts.values() if not isinstance(v, str)]
        if wrong:
            cause = f"extension {e.name!r}: {kind} has {wrong[0]!r:.80}"
            value = "TEXT" if kind == "pipelines" else "module:object"
            raise Diagnostic("E423", cause, f'map names to texts: {kind}={{"NAME": "{value}"}}')


def combine(extensions: Iterable[Extension]) -> Registry:
    """Merge extensions into one registry.

    Raises Diagnostic E422 if two provide the same name of a kind, and E423 if a kind does not map names to texts.
    """
    members = tuple(extensions)
    for extension in members:
        _check_texts(extension)
    contributions = {
        kind: Contributions(_singular(kind), _merged(members, kind), literal=kind == "pipelines") for kind in KINDS
    }
    return Registry(**contributions, extensions=members)


def _merged(extensions: Iterable[Extension], kind: str) -> Mapping[str, str]:
    """Merge the texts of one kind by name; raises Diagnostic E422 if two extensions provide the same name."""
    texts: dict[str, str] = {}
    owner: dict[str, str] = {}
    for extension in extensions:
        for name, text in getattr(extension, kind).items():
            if name in texts:
                raise _clash(_singular(kind), name, owner[name], extension.name)
            texts[name], owner[name] = text, extension.name
    return MappingProxyType(texts)


def load(more: Iterable[Extension] = ()) -> Registry:
    """Return the registry of llmc's own extension, the installed packages' and `more` (for tests and notebooks)."""
    from importlib.metadata import entry_points

    points = {p.value: p for p in entry_points(group=GROUP)}
    points.pop(BUILTIN, None)
    values = [BUILTIN, *(v for v, p in sorted(points.items(), key=lambda item: item[1].name))]
    extensions, versions, names = [], {}, {}
    for value in values:
        extension = resolve(value, "extension")
        if not isinstance(extension, Extension):
            raise Diagnostic(
                "E423", f"extension {value!r} is not an Extension", "make it an instance of llmc.extension.Extension"
            )
        extensions.append(extension)
        dist = points[value].dist if value in points else None
        versions[extension.name], names[value] = dist.version if dist else "", extension.name
    return replace(combine([*extensions, *more]), versions=MappingProxyType(versions), points=MappingProxyType(names))


def extension_at_fault(error: Exception) -> Diagnostic | None:
    """Return Diagnostic E427 if the code of an installed extension was running when `error` was raised, else None."""
    try:
        extensions = load().extensions
    except LlmcError:
        return None
    modules = {m: e for e in extensions if e.name != "llmc" for m in _modules(e)}
    at: TracebackType | None = error.__traceback__
    while at is not None:
        name = str(at.tb_frame.f_globals.get("__name__", ""))
        if extension := modules.get(name.partition(".")[0]):
            return extension_error(f"the extension {extension.name!r}", error)
        at = at.tb_next
    return None


def _modules(e: Extension) -> set[str]:
    """Return the top-level modules that an extension's texts name, except llmc."""
    texts = (text for kind in KINDS if kind != "pipelines" for text in getattr(e, kind).values())
    return {text.partition(":")[0].partition(".")[0] for text in texts} - {"llmc", "llmc_runtime"}
