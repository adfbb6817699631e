"""One compile: trace, passes, kernels, weights and the artifact folder, in this order."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import require_compiler
from llmc_runtime.format.manifest import Limits, Manifest, Source, TargetInfo
from llmc_runtime.format.names import DRAFT_MODEL
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.program import DRAFT_PREFIX
from llmc_runtime.format.size_text import size_text

from llmc.codegen.toolchain import Toolset
from llmc.console import Console, Summary, next_command
from llmc.diagnostics import Diagnostic
from llmc.draft_artifact import read_verifier
from llmc.draft_head import head_of
from llmc.draft_model import DraftSource, add_draft
from llmc.extension import Registry
from llmc.frontend.hub import Located
from llmc.frontend.pooling_files import pooling_notes
from llmc.ir.graph import WEIGHTS, Graph, Module
from llmc.ir.ops.recurrent import PROMPT_OPS
from llmc.ir.text import show
from llmc.options import Options, random_seed
from llmc.passes.base import Ctx, Pass
from llmc.passes.lower.shard import with_ranks
from llmc.passes.pass_report import Record
from llmc.passes.pipeline import override, parse_pipeline, require, run_pipeline
from llmc.provenance import compiler_text, idle_passes, source_of, used_extensions, versions
from llmc.targets.target import Target

DTYPES = (("float32", "f32"), ("bfloat16", "bf16"))
MAX_LEN = 32768
RECURRENT_ROWS = 256  # states of 75 MB a sequence (Qwen3-Next-80B) take 19 GB
# Target family -> checkpoint dtype -> dtype that is compiled instead. CPU kernels multiply bfloat16, but not float16.
SUBSTITUTE_DTYPES: Mapping[str, Mapping[str, str]] = MappingProxyType({"cpu": {"f16": "bf16"}})


def default_rows(target: Target, main: Graph) -> int:
    """Return the default number of sequences in one step: a recurrent layer has a state for each of them."""
    recurrent = any(n.op.name in PROMPT_OPS for n in main.nodes)
    return min(target.rows, RECURRENT_ROWS) if recurrent else target.rows


class Compilation:
    """One compile: runs the stages in order, times them and passes results from one to the next."""

    def __init__(
        self, origin: Located, output: Path, options: Options, registry: Registry, target: Target, force: bool,
        console: Console,
    ):  # fmt: skip
        self.origin = origin
        self.model = origin.folder
        self.output = output
        self.options = options
        self.registry = registry
        self.target = target
        self.force = force  # whether to replace an existing artifact
        self.console = console
        self.config: Mapping[str, Any] = {}  # the model's config.json, once it is traced
        self.rows = options.max_num_seqs or target.rows  # maximum sequences of a step
        self.tokens = options.max_num_batched_tokens or target.tokens  # maximum tokens of a step
        self.summary = Summary(str(output), next=next_command(origin.folder, output, options, target))
        self.clock = time.perf_counter()
        self.ir: list[tuple[str, str]] = []  # (stage, IR text)
        self.reports: dict[str, Any] = {}  # file name in report/ -> data
        self.formats: dict[str, int] = {}  # quantised format -> number of the checkpoint's weights in it
        self.extensions: dict[str, list[str]] = {}  # extension -> its parts that the compile used
        self.shapes_known = False  # whether stored tensors have the shapes that the whole model's weights have
        self.head = head_of(options)  # the head that drafts, if there is one
        # the artifact for which the model drafts, if it is a draft model
        self.verifier = read_verifier(options.drafts_for) if options.drafts_for else None
        self.kv_dtype = ""  # dtype of the KV cache; empty: the dtype of the activations
        self.pool = ""  # how the model pools (see PageAttention); empty: it generates

    def done(self, stage: str, detail: str) -> None:
        """Record the seconds since the previous stage ended, and print the stage's line."""
        now = time.perf_counter()
        self.summary.seconds[stage] = now - self.clock
        self.console.stage(stage, detail, now - self.clock)
        self.clock = now

    def note(self, text: str | None) -> None:
        """Print a note, if there is one, and keep it for the summary, unless it was printed before."""
        if not text or text in self.summary.notes:
            return
        self.summary.notes.append(text)
        self.console.note(f"note: {text}")

    def run(self) -> Manifest:
        """Run all stages and return the manifest of the written artifact."""
        from llmc.frontend.tokenizer_files import (
            check_tokenizer,
            unusable_templates,
            without_embedding,
            without_tokenizer,
        )
        from llmc.quantized_compile import unread_codes

        tokenizer = check_tokenizer(self.model)
        if self.verifier is None:
            self.note(without_tokenizer(self.model))
            for text in unusable_templates(self.model):
                self.note(text)
        seed = random_seed(self.options.weights)
        with ExitStack() as stack:
            packed = self.options.weights == "packed"
            traced, checkpoint = self.opened(stack) if packed else (self.trace(), None)
            self.note(unread_codes(self.options.weights, traced))
            self.note(without_embedding(tokenizer, traced.facts.vocab_size))
            draft = add_draft(self, traced, stack, packed)
            self.optimise(traced.module, traced.facts.max_positions)
            built = self.build(traced.module)
            weights = self.weights(traced.module.graphs[WEIGHTS], checkpoint, draft) if checkpoint else seed
            manifest = self.write(traced, weights, built)
            self.note(checkpoint.not_finite.note if checkpoint else None)
            if draft and draft.not_finite.note:
                self.note(f"draft: {draft.not_finite.note}")
            return manifest

    def weights(self, graph: Graph, checkpoint: Any, draft: Any = None) -> Any:
        """Return the weights to evaluate: the checkpoint's, the draft model's, and the scales of the KV cache."""
        from llmc.artifact.write import PackedWeights
        from llmc.kv_cache import WithKvScales

        if self.verifier is not None:
            source = WithKvScales(checkpoint, graph, DRAFT_PREFIX)
            self.note(source.note)
            return PackedWeights(graph, DraftSource(None, source))
        source = WithKvScales(checkpoint, graph)
        self.note(source.note)
        return PackedWeights(graph, DraftSource(source, WithKvScales(draft, graph, DRAFT_PREFIX)) if draft else source)

    def opened(self, stack: ExitStack) -> tuple[Any, Any]:
        """Trace the model and open its weights, which `stack` closes.

        Weights that config.json ties although the checkpoint stores different ones are used as they are stored.
        """
        from llmc.frontend.checkpoint import TiedWeightsDiffer
        from llmc.frontend.model_folder import open_source
        from llmc.frontend.safetensors_reader import TensorFiles

        TensorFiles(self.model).close()  # raises for damaged files, before the trace
        self.shapes_known = not (self.options.layers or open_source(self.model).config.get("quantization_config"))
        traced = self.trace()
        try:
            return traced, stack.enter_context(self.checkpoint(traced))
        except TiedWeightsDiffer as differ:
            self.note(f"{differ.cause}; each is used as it is stored, as transformers does")
            self.ir.clear()
            traced = self.trace(differ.names)
            return traced, stack.enter_context(self.checkpoint(traced))

    def checkpoint(self, traced: Any) -> Any:
        """Open the model's weights; give quantised ones quantised types in the graph, and note the formats."""
        from llmc.frontend.checkpoint import Checkpoint
        from llmc.quant.decoder import decoder_of
        from llmc.quant.typed_weights import use_codes

        decoder = decoder_of(traced.source.config, self.registry.schemes)
        checkpoint = Checkpoint(traced, decoder=decoder)
        if decoder and decoder.labels:
            num_codes = use_codes(traced.module, checkpoint, self.registry.opset())
            self.ir.append(("quantised-weights", show(traced.module)))
            self.formats |= decoder.labels.most_common()
            formats = ", ".join(f"{count} in {label}" for label, count in self.formats.items())
            total = sum(decoder.labels.values())
            rest = f"; {total - num_codes} of them are converted to {traced.facts.dtype}" if num_codes < total else ""
            self.note(f"the checkpoint has quantised weights: {formats}{rest}")
        elif decoder and not checkpoint.kv_scales:
            method = traced.source.config["quantization_config"]["quant_method"]
            self.note(f"config.json has quantised weights by {method}, but the checkpoint has none: all are floats")
        return checkpoint

    def trace(self, untied: Collection[str] = ()) -> Any:
        """Trace the model into IR, with limits and dtype applied; `untied` as in `trace_model.trace`.

        Raises LlmcError E640 without torch, Diagnostic E501 without the compiler of the target's first language.
        """
        require_compiler()
        Toolset(self.target, self.registry.toolchains).of(self.target.languages[0])  # build needs it after the passes
        self.console.begin("trace", f"{self.model.name} (imports torch and transformers)")
        from llmc.frontend.trace_model import notes_of

        traced = self._limited(self._traced(untied))
        facts = traced.facts
        self.ir.append(("traced", show(traced.module)))
        self.config = traced.source.config
        self.rows = self.options.max_num_seqs or default_rows(self.target, traced.module.graphs["main"])
        if facts.pooling is not None:
            self._pool(facts.pooling, traced)
        self._choose_kv_dtype()
        for text in notes_of(traced):
            if self.verifier is None or not text.startswith("sampling defaults"):  # the model's own defaults are used
                self.note(text)
        if facts.layers:
            part = Source("", "", "", {}, *facts.layers).part
            self.note(f"--layers: {part} only; the output differs from the full model's")
        self.done("trace", f"{facts.architecture}, {len(traced.module.graphs['main'].nodes)} nodes, {facts.dtype}")
        return traced

    def _traced(self, untied: Collection[str]) -> Any:
        """Trace the model with the options of the compile."""
        from llmc.frontend.checkpoint import check_shapes
        from llmc.frontend.trace_model import trace

        o = self.options
        return trace(
            self.model,
            dict(DTYPES).get(o.dtype),
            max_positions=o.max_model_len,
            max_tokens=self.tokens,
            max_rows=self.rows,
            layers=o.layers,
            substitutes=SUBSTITUTE_DTYPES.get(self.target.family, {}),
            untied=untied,
            check=partial(check_shapes, folder=self.model) if self.shapes_known else None,
            aux_layers=self.head.aux_layers if self.head else lambda total: (),
            task=o.task,
            pooling=o.pooling,
        )

    def _limited(self, traced: Any) -> Any:
        """Limit the positions of a model to MAX_LEN unless they are an option; note that, and a substituted dtype."""
        facts = traced.facts
        if self.options.dtype not in dict(DTYPES) and facts.dtype != facts.stored_dtype:
            self.note("the checkpoint is float16, compiled as bfloat16; --dtype float32 keeps every bit")
        if self.options.max_model_len is not None or facts.max_positions <= MAX_LEN:
            return traced
        self.note(
            f"the model allows {facts.max_positions} positions, compiled for {MAX_LEN}; use --max-model-len to override"
        )
        return replace(traced, facts=replace(facts, max_positions=MAX_LEN))

    def _choose_kv_dtype(self) -> None:
        """Set the dtype of the KV cache to the option's or the checkpoint's; empty means that of the activations."""
        from llmc.kv_cache import kv_dtype
        from llmc.quant.kv_scales import kv_dtype_of

        option = self.options.kv_cache_dtype
        stored = kv_dtype_of(self.config) if option == "auto" else ""
        self.kv_dtype, note = kv_dtype(option, stored, self.target, self.registry)
        self.note(note)

    def _pool(self, pooling: Pooling, traced: Any) -> None:
        """Set the limits and the next command of a model that pools.

        Raises Diagnostic E313 for options of models that generate.
        """
        # --speculate comes last, since the others set the number of drafts, too
        drafts = {"--draft": self.options.draft, "--drafts-for": self.options.drafts_for}
        for name, value in {**drafts, "--speculate": self.options.speculate}.items():
            if value:
                cause = f"{name}: the model pools its prompts and generates nothing"
                raise Diagnostic("E313", cause, f"leave {name} out")
        if pooling.whole:  # a prompt that runs whole must fit into one step
            self.tokens = max(self.tokens, traced.facts.max_positions)
        self.pool = pooling.kind
        for note in pooling_notes(pooling, traced.source):
            self.note(note)
        self.summary.next = next_command(self.model, self.output, self.options, self.target, pooling.task)

    def passes(self, max_len: int) -> list[Pass]:
        """Parse the pipeline and set its size options."""
        from llmc.kv_cache import with_kv_dtype
        from llmc.quantized_compile import with_quantize

        registry, target = self.registry, self.target
        text = self.options.pipeline or target.pipeline
        passes = parse_pipeline(text, registry.passes, registry.pipelines_for(target))
        passes = with_kv_dtype(with_quantize(passes, self.options), self.kv_dtype)
        sizes = {"rows": self.rows, "max_len": max_len, "page": target.page_size, "tokens": self.tokens}
        if self.options.speculate:
            require(passes, "page-attention", "--speculate")
        drafts = self.options.draft is not None or self.verifier is not None
        sizes |= {"draft_logprobs": drafts and target.family == "cpu"}  # read after each draft
        passes = override(passes, "page-attention", speculate=self.options.speculate, pool=self.pool, **sizes)
        passes = with_ranks(passes, self.options.tensor_parallel_size, target)
        return override(passes, "select", tuning=str(self.options.tuning)) if self.options.tuning else passes

    def optimise(self, module: Module, max_len: int) -> None:
        """Run the passes over `module` in place, recording each stage's IR text."""
        ctx = Ctx(self.registry.opset(), self.target, self.registry.kernels)
        record = Record(module, ctx)

        def observe(i: int, p: Pass, changes: int, seconds: float, m: Module) -> None:
            self.ir.append((p.name, show(m)))
            record.observe(p, changes, m)
            self.console.part("passes", i + 1, len(passes))

        passes = self.passes(max_len)
        run_pipeline(module, passes, ctx, observe)
        self.reports |= {"passes.json": record.data, "choices.json": ctx.choices}
        self.extensions = used_extensions(self.registry, self.options.target, passes, module, self.config)
        self.done("passes", record.summary())
        for line in [*ctx.notes, *idle_passes(self.extensions, record.data)]:
            self.note(line)

    def build(self, module: Module) -> Any:
        """Compile the kernels of the selected nodes and lay out the programs."""
        from llmc.codegen.build import build
        from llmc.codegen.scratch_dir import keep, scratch

        def progress(done: int, of: int, what: str) -> None:
            self.console.part("kernels", done, of)

        self.console.begin("kernels")
        with ExitStack() as stack:
            cache = self.options.cache / "kernels" if self.options.cache else stack.enter_context(scratch())
            cache.mkdir(parents=True, exist_ok=True)
            try:
                built = build(module, self.target, cache, self.registry.kernels, self.registry.toolchains, progress)
            except Diagnostic as error:
                if error.code == "E502":
                    keep(cache)  # keep the kernel source that failed to compile: the error message names it
                raise
        launches = sum(len(p.launches) for p in built.programs)
        self.done("kernels", f"{len(built.kernels)} binaries for {launches} launches in {len(built.programs)} programs")
        return built

    def write(self, traced: Any, weights: Any, built: Any) -> Manifest:
        """Write the artifact folder and return its manifest."""
        from llmc.artifact.weight_signs import negative_weights
        from llmc.artifact.write import Parts, states_of, write_artifact

        module, facts, target = traced.module, traced.facts, self.target
        parts = Parts(
            compiler=compiler_text(self.registry, self.extensions),
            source=source_of(traced, self.origin),
            target=TargetInfo(target.name, target.arch, tuple(sorted(target.features))),
            limits=Limits(facts.max_positions, self.rows, self.tokens),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            page_size=target.page_size,
            states=states_of(module),
            kernels=built.kernels.values(),
            programs=built.programs,
            weights=weights,
            tokenizer=self.verifier.tokenizer_files if self.verifier else traced.source.tokenizer_files,
            generation=facts.generation,
            pooling=facts.pooling,
            role=DRAFT_MODEL if self.verifier else "",
            negative=negative_weights(module.graphs[WEIGHTS]) if isinstance(weights, int) else (),
            ir=self.ir,
            machine=target,
            reports={
                **self.reports,
                "memory.json": built.memory,
                "compile.json": self.compile_report(built.toolchains),
            },
        )
        manifest = write_artifact(
            self.output, parts, force=self.force, progress=lambda done, of: self.console.part("weights", done, of, "B")
        )
        self.done("weights", f"{manifest.weights.mode}, {size_text(manifest.weights.nbytes)} written and hashed")
        return manifest

    def compile_report(self, toolchains: Mapping[str, str]) -> dict[str, Any]:
        """Return the options and decisions of the compile, for the artifact's report.

        It contains no times and no paths, so that equal compiles give equal reports. toolchains: compiler -> version.
        """
        options, notes = self.options.recorded(), self.summary.notes
        return {"options": options, "notes": notes, "versions": versions(toolchains, self.registry, self.extensions)}
