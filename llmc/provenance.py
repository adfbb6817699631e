"""The provenance that an artifact records: the model, the versions, and the extensions that the compile has used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmc_runtime.format.manifest import Source

from llmc import __version__
from llmc.builtin import EXTENSION as BUILTIN
from llmc.codegen.kernel import Kernel
from llmc.extension import Registry
from llmc.frontend.hub import Located
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.passes.base import Pass
from llmc.passes.pipeline import parse_pipeline
from llmc.targets.target import Target


def used_extensions(
    registry: Registry, target: str, passes: Iterable[Pass], module: Module, config: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return extension -> what the compile has used of it, such as "kernel a/b"; llmc's own extension is left out.

    target: the requested name. passes: those that ran. module: after all passes. config: of the model.
    """
    nodes = [n for g in module.graphs.values() for n in g.nodes]
    kernels = {str(n.choice["kernel"]) for n in nodes if n.choice.get("kernel")}
    quantisation = config.get("quantization_config")
    scheme = str(quantisation.get("quant_method", "")) if isinstance(quantisation, dict) else ""
    used: dict[str, Iterable[str]] = {
        "targets": [target.partition("+")[0]],
        "passes": [p.name for p in passes],
        "ops": {n.op.name for n in nodes},
        "kernels": kernels,
        "toolchains": {registry.kernels[k].language for k in kernels if k in registry.kernels},
        "schemes": [scheme],
    }
    out: dict[str, list[str]] = {}
    for extension in registry.extensions:
        if extension is BUILTIN:
            continue
        parts = [
            f"{getattr(registry, kind).kind} {name}"
            for kind, names in used.items()
            for name in sorted(set(names))
            if name in getattr(extension, kind)
        ]
        if parts:
            out[extension.name] = parts
    return out


def related_extensions(registry: Registry, target: Target, text: str, config: Mapping[str, Any]) -> set[str]:
    """Return the names of the extensions on which the result of a compile may depend.

    target: the compile's. text: of its pipeline. config: of the model. An extension that only offers other targets,
    schemes and pipelines, passes that do not run, and kernels of ops that therefore do not occur, changes nothing.
    """
    passes = {p.name for p in parse_pipeline(text, registry.passes, registry.pipelines_for(target))}
    quantisation = config.get("quantization_config")
    method = str(quantisation.get("quant_method", "")) if isinstance(quantisation, dict) else ""
    outside = [e for e in registry.extensions if e is not BUILTIN]
    changed = any(passes & e.passes.keys() for e in outside)  # a graph may then have ops of extensions

    def matters(name: str) -> bool:
        kernel = registry.kernels[name]
        claims = type(kernel).claims is not Kernel.claims  # it may claim any op
        return kernel.language in target.languages and (changed or claims or any(o in OPS for o in kernel.ops))

    return {
        e.name
        for e in outside
        if passes & e.passes.keys()
        or target.name.partition("+")[0] in e.targets
        or {method, method.lower().replace("_", "-")} & e.schemes.keys()
        or any(name in text for name in e.pipelines)
        or e.toolchains.keys() & set(target.languages)
        or any(matters(name) for name in e.kernels)
    }


def compiler_text(registry: Registry, used: Iterable[str]) -> str:
    """Return the manifest's text about the compiler: llmc and the used extensions, with their versions."""
    return ", ".join([f"llmc {__version__}", *(f"{name} {_version(registry, name)}".rstrip() for name in used)])


def _version(registry: Registry, extension: str) -> str:
    return registry.versions.get(extension, "")


def versions(toolchains: Mapping[str, str], registry: Registry, used: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the versions that an artifact depends on: llmc, torch, transformers, the compilers, the used extensions.

    Those of extensions also name what was used of them.
    """
    extensions = {f"extension {e}": f"{_version(registry, e)} ({', '.join(p)})".lstrip() for e, p in used.items()}
    from importlib.metadata import version

    return {"llmc": __version__, **{n: version(n) for n in ("torch", "transformers")}, **toolchains, **extensions}


def source_of(traced: Any, origin: Located) -> Source:
    """Provenance for the manifest: name, commit, and hashes of the model's small files."""
    from llmc_runtime.format.hashing import sha256

    root = traced.source.folder
    small = {p.relative_to(root).as_posix(): sha256(p.read_bytes()) for p in traced.source.tokenizer_files}
    cut = traced.facts.layers or (0, 0)
    return Source("hf", origin.name or root.resolve().name, origin.commit, small, *cut)
