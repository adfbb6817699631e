"""The entry points of a compile: check the options, locate the model, and reuse an artifact or compile one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import require_compiler
from llmc_runtime.format.manifest import Manifest

from llmc.codegen.toolchain import installed
from llmc.compilation import Compilation
from llmc.console import Console, Quiet, Summary
from llmc.diagnostics import Diagnostic
from llmc.draft_artifact import check_source, reads_hidden_states
from llmc.draft_model import check_draft, with_draft
from llmc.extension import Registry, load
from llmc.frontend.eagle_config import describes_head
from llmc.frontend.hub import Located, locate
from llmc.options import Options, check_values, random_seed
from llmc.passes.lower.shard import with_ranks
from llmc.passes.pipeline import parse_pipeline
from llmc.provenance import related_extensions
from llmc.targets.target import Target, deterministic, with_nccl


def compile_model(
    model: str | Path,
    output: str | Path,
    options: Options | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Summary:
    """Compile `model`, a Hugging Face folder or a hub id (owner/name@revision), into the artifact folder `output`.

    If the cache has an artifact of an identical compile, its files are linked instead. Raises Diagnostic (E3xx model
    and checkpoint, E4xx passes, E5xx toolchain, E12x output folder); a failed compile leaves no files behind.
    """
    from llmc.quantized_compile import quantised_first

    options, console = options or Options(), console or Quiet()
    with quantised_first(model, Path(output), options, console) as source:
        return _compile(source, Path(output), options, force, console)


def _compile(model: str | Path, output: Path, options: Options, force: bool, console: Console) -> Summary:
    """Link an identical artifact from the cache, or compile the model and store the artifact there."""
    from llmc.artifact.publish import check_free
    from llmc.frontend.model_folder import open_source
    from llmc.report.inspect import facts_of
    from llmc.reuse import Reuse

    check_free(output.absolute(), force)
    random_seed(options.weights)
    options = with_draft(options)
    job = start(model, output, options, force, console)
    key = _key_options(job.options, job.target, job.origin, job.registry.toolchains)
    text, config = job.options.pipeline or job.target.pipeline, open_source(job.model).config
    related = related_extensions(job.registry, job.target, text, config)
    cache = job.options.cache if job.options.reuse else None
    reuse = Reuse(cache, job.model, key, lambda point: job.registry.points.get(point.value, "") in related)
    if (entry := reuse.find()) is not None:
        reuse.restore(job.output, force)
        job.done("reuse", f"linked an identical artifact from {entry}")
        job.summary.facts |= facts_of(Manifest.load((job.output / "manifest.json").read_bytes()))
        for text in json.loads((job.output / "report" / "compile.json").read_text())["notes"]:
            job.note(text)
        return job.summary
    manifest = job.run()
    reuse.store(job.output)
    job.summary.facts |= facts_of(manifest)
    return job.summary


def start(model: str | Path, output: Path, options: Options, force: bool, console: Console) -> Compilation:
    """Validate the options, locate (or download) the model, and return the compile without running it."""
    from llmc.codegen.scratch_dir import check_cache
    from llmc.codegen.tuning_records import read as read_records

    console.begin("open", str(model))
    registry = load()
    target = registry.target(options.target)
    if options.deterministic:
        target = deterministic(target, options.speculate)
    if options.collectives == "nccl":
        target = with_nccl(target, options.tensor_parallel_size)
    check_values(options)
    if options.tuning:
        read_records(options.tuning)  # report a malformed file before any work is done
    if options.cache:
        check_cache(options.cache)
    passes = parse_pipeline(options.pipeline or target.pipeline, registry.passes, registry.pipelines_for(target))
    with_ranks(passes, options.tensor_parallel_size, target)  # report options that do not fit together
    at = locate_model(model, options, registry, console)
    job = Compilation(at, output, options, registry, target, force, console)
    if job.verifier is not None:
        of_model = job.verifier.manifest
        check_draft(job.verifier.tokenizer_dir, at.folder, of_model.vocab_size, of_model.limits.max_model_len)
    return job


def locate_model(model: str | Path, o: Options, registry: Registry, console: Console) -> Located:
    """Return the model's folder, downloading it first if `model` is a hub id (see `locate`)."""
    from llmc.quant.decoder import decoder_of

    def progress(done: int, of: int) -> None:
        console.part("fetch", done, of, "B")

    if o.drafts_for is not None:
        check_source(model)
    if not Path(model).exists():
        require_compiler()  # before a model is downloaded

    def check(config: Mapping[str, Any]) -> None:
        if describes_head(config) and o.drafts_for is not None:
            raise reads_hidden_states(str(model))
        if describes_head(config):
            remedy = f"compile the model for which it drafts, with --draft eagle:{model}"
            raise Diagnostic("E303", f"{model} is an EAGLE-3 head, not a model", remedy)
        decoder_of(config, registry.schemes)

    located = locate(model, o.hub, o.weights == "packed", progress, check)
    if located.commit:
        console.note(f"{located.name} at commit {located.commit}: {located.folder}")
    return located


def _key_options(o: Options, target: Target, origin: Located, toolchains: Mapping[str, Any]) -> Mapping[str, Any]:
    facts: dict[str, Any] = {"features": sorted(target.features), "arch": target.arch}
    facts |= {"rows": target.rows, "tokens": target.tokens, "tools": installed(target, toolchains)}
    facts["origin"] = [origin.name, origin.commit]
    return {**o.recorded(), **facts, "tuning": o.tuning.read_text() if o.tuning else ""}
