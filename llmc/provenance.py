"""The provenance that an artifact records: the model, the versions, and the extensions that the compile has used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmc_runtime.format.manifest import Source

from llmc import __version__
from llmc.builtin import EXTENSION as BUILTIN
from llmc.codegen.kernel import Kernel
from llmc.extension import Extension, Registry
from llmc.frontend.hub import Located
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.passes.base import Pass
from llmc.passes.pipeline import parse_pipeline
from llmc.targets.target import Target


def used_extensions(
    registry: Registry, target: str, passes: Iterable[Pass], module: Module, config: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return extension -> its parts that the compile has used, such as "kernel a/b"; llmc's own extension is left out.

    target: the requested name. passes: names of the passes that ran. module: after all passes. config: of the model.
    """
    nodes = [n for g in module.graphs.values() for n in g.nodes]
    kernels = {str(n.choice["kernel"]) for n in nodes if n.choice.get("kernel")}
    used: dict[str, Iterable[str]] = {
        "targets": [target.partition("+")[0]],
        "passes": [p.name for p in passes],
        "ops": {n.op.name for n in nodes},
        "kernels": kernels,
        "toolchains": {registry.kernels[k].language for k in kernels if k in registry.kernels},
        "schemes": [_scheme_of(config)],
    }
    by_extension: dict[str, list[str]] = {}
    for extension in registry.extensions:
        if extension is BUILTIN:
            continue
        for kind, names in used.items():
            noun, provided = getattr(registry, kind).kind, getattr(extension, kind)
            for name in sorted(provided.keys() & set(names)):
                by_extension.setdefault(extension.name, []).append(f"{noun} {name}")
    return by_extension


def idle_passes(used: Mapping[str, Sequence[str]], report: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note for each pass of an extension that has changed nothing.

    used: as `used_extensions` returns it. report: the entries of report/passes.json.
    """
    changed = {entry["pass"].partition("{")[0] for entry in report if entry["changes"]}
    parts = [(extension, *part.split(" ", 1)) for extension, parts in used.items() for part in parts]
    return [
        f"the pass {name} of the extension {extension} changed nothing (llmc opt --explain prints near misses)"
        for extension, kind, name in parts
        if kind == "pass" and name not in changed
    ]


def _scheme_of(config: Mapping[str, Any]) -> str:
    """Return the quantisation method that a model's config names, or ""."""
    quantisation = config.get("quantization_config")
    return str(quantisation.get("quant_method", "")) if isinstance(quantisation, dict) else ""


def related_extensions(registry: Registry, target: Target, text: str, config: Mapping[str, Any]) -> set[str]:
    """Return the names of the extensions on which the result of a compile may depend.

    target: the compile's. text: of its pipeline. config: of the model. An extension that only offers other targets,
    schemes and pipelines, passes that do not run, and kernels of ops that therefore do not occur, changes nothing.
    """
    passes = {p.name for p in parse_pipeline(text, registry.passes, registry.pipelines_for(target))}
    scheme = _scheme_of(config)
    outside = [e for e in registry.extensions if e is not BUILTIN]
    new_ops = any(passes & e.passes.keys() for e in outside)  # passes of extensions may insert their ops

    def may_run(kernel: Kernel) -> bool:
        claims_any = type(kernel).claims is not Kernel.claims
        return kernel.language in target.languages and (new_ops or claims_any or any(op in OPS for op in kernel.ops))

    def is_related(e: Extension) -> bool:
        return bool(
            passes & e.passes.keys()
            or target.name.partition("+")[0] in e.targets
            or {scheme, scheme.lower().replace("_", "-")} & e.schemes.keys()
            or any(name in text for name in e.pipelines)
            or e.toolchains.keys() & set(target.languages)
            or any(may_run(registry.kernels[name]) for name in e.kernels)
        )

    return {e.name for e in outside if is_related(e)}


def compiler_text(registry: Registry, used: Iterable[str]) -> str:
    """Return the manifest's text about the compiler: llmc and the used extensions, with their versions."""
    return ", ".join([f"llmc {__version__}", *(f"{name} {_version(registry, name)}".rstrip() for name in used)])


def _version(registry: Registry, extension: str) -> str:
    return registry.versions.get(extension, "")


def versions(toolchains: Mapping[str, str], registry: Registry, used: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the versions that an artifact depends on: llmc, torch, transformers, the compilers, the used extensions.

    Those of extensions also name the used parts.
    """
    from importlib.metadata import version

    result = {"llmc": __version__, "torch": version("torch"), "transformers": version("transformers"), **toolchains}
    for extension, parts in used.items():
        result[f"extension {extension}"] = f"{_version(registry, extension)} ({', '.join(parts)})".lstrip()
    return result


def source_of(traced: Any, origin: Located) -> Source:
    """Return the provenance for the manifest: name, commit, and hashes of the model's small files."""
    from llmc_runtime.format.hashing import sha256

    root = traced.source.folder
    small = {p.relative_to(root).as_posix(): sha256(p.read_bytes()) for p in traced.source.tokenizer_files}
    cut = traced.facts.layers or (0, 0)
    return Source("hf", origin.name or root.resolve().name, origin.commit, small, *cut)
