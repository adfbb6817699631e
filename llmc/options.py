"""The options of a compile, declared once: the Python keyword, the flag, its help, and what an artifact records."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.command_parser import CommandParser
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import GENERATE, POOLING_KINDS, TASKS
from llmc_runtime.format.row_abi import MAX_DRAFTS
from llmc_runtime.option_type import of_command, option, options_of, positive
from llmc_runtime.speculate_option import DEFAULT_DRAFTS

from llmc.builtin import EXTENSION
from llmc.diagnostics import Diagnostic
from llmc.frontend.eagle_config import EAGLE
from llmc.frontend.hub import PUBLIC, Hub
from llmc.frontend.unsupported import refuse_code
from llmc.quant.make.recipes import NONE, RECIPES, ROUNDED

COMPILE_AND_TUNE = ("compile", "tune")
# Maximum limits of any target.
MAX_LIMITS: Mapping[str, int] = MappingProxyType({"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 20})
QUANT_FLAGS = ("--quant", "--scheme")  # spellings of the recipe in `llmc compile` and `llmc quantize`
FILES = "files and caches"  # heading of the options that do not change the contents of an artifact


def _artifact(default: Any, text: str, read: Any = positive, metavar: str | None = "N", **more: Any) -> Any:
    """Declare an option that determines the contents of an artifact."""
    more = {"commands": COMPILE_AND_TUNE, "group": "artifact", **more}
    return option(default, text, read=read, metavar=metavar, **more)


def _path(text: str, metavar: str) -> Any:
    return option(None, text, read=Path, metavar=metavar, commands=COMPILE_AND_TUNE, group=FILES)


def _drafted_tokens(text: str) -> int:
    """Parse a number of drafted tokens; raises argparse.ArgumentTypeError for a method, which only an engine has."""
    try:
        return int(text)
    except ValueError:
        cause = f"{text[:60]!r} is not a number of drafted tokens, 0 to {MAX_DRAFTS}"
        remedy = (
            f"compile with --speculate {DEFAULT_DRAFTS}; a method such as ngram is an option of llmc-run and llmc-serve"
        )
        raise argparse.ArgumentTypeError(f"{cause}; {remedy}") from None


@dataclass(frozen=True)
class Options:
    """Options of a compile. A limit of None means the target's default, or the model's own limit, at most 32768.

    `weights` is "packed", "none" (pack later) or "random:SEED" (filled in by the runtime). `cache` is a folder for
    kernels and, if `reuse`, whole artifacts (None: no cache). `hub` is where model ids are looked up.
    """

    target: str = _artifact("cpu:native", "machine to compile for (cpu:native)", str, "NAME")
    dtype: str = _artifact(
        "auto", "dtype of weights and activations (auto: the checkpoint's)", str, None,
        choices=("auto", "float32", "bfloat16"),
    )  # fmt: skip
    kv_cache_dtype: str = _artifact(
        "auto", "dtype of the KV cache, fp8 for float8_e4m3 (auto: the checkpoint's, else the activations')", str,
        None, choices=("auto", "bf16", "bfloat16", "fp8", "fp8_e4m3"),
    )  # fmt: skip
    task: str = _artifact(
        "auto", "task of the model: generate text, embed prompts, or classify them (auto: from its files)", str,
        None, choices=("auto", GENERATE, *TASKS),
    )  # fmt: skip
    pooling: str = _artifact(
        "auto", "pooling of hidden states: of the last token (last), the first (cls), or the mean of all (mean) (auto: "
        "from the model's files)", str, None, choices=("auto", *POOLING_KINDS),
    )  # fmt: skip
    max_model_len: int | None = _artifact(None, "maximum length of a sequence in tokens (the model's, at most 32768)")
    max_num_seqs: int | None = _artifact(
        None, "maximum number of sequences in one step (CPU: 16, GPU: 512, or 256 with recurrent layers or "
        "--deterministic)"
    )  # fmt: skip
    max_num_batched_tokens: int | None = _artifact(None, "maximum number of tokens in one step (CPU: 512, GPU: 8192)")
    tensor_parallel_size: int = _artifact(
        1, "number of ranks over which the model is divided; each is a process with its own GPU or CPUs (1)",
    )  # fmt: skip
    collectives: str = _artifact(
        "peer", "how ranks on GPUs exchange results: kernels that write to peer memory, or NCCL for GPUs that cannot "
        "access each other's memory (peer)", str, None, choices=("peer", "nccl"), commands=("compile",),
    )  # fmt: skip
    speculate: int = _artifact(
        0, f"maximum number of drafted tokens that a step verifies per sequence, 0 to {MAX_DRAFTS} (0; with --draft 4)",
        _drafted_tokens, commands=("compile",),
    )  # fmt: skip
    draft: str | None = _artifact(
        None, "source of drafted tokens: a smaller model with the same tokenizer (folder or hub id), eagle:PATH (an "
        "EAGLE-3 head), or mtp (the multi-token-prediction layer of the model's own checkpoint) (none)", str, "MODEL",
        commands=("compile",),
    )  # fmt: skip
    drafts_for: Path | None = _artifact(
        None, "compile a draft model for this artifact, which was compiled with --speculate, and for others with the "
        "same limits; target, limits and ranks are those of the artifact (none)", Path, "ARTIFACT",
        commands=("compile",),
    )  # fmt: skip
    pipeline: str = _artifact("", 'pass pipeline, for example "serve, after fuse-norm: my-fuse" (serve)', str, "TEXT")
    weights: str = _artifact(
        "packed", "weights of the artifact: packed (the checkpoint's), random:SEED, or none (packed)", str, "KIND",
        commands=("compile",),
    )  # fmt: skip
    quant: str = _artifact(
        NONE, "recipe that quantises the weights of matrix products (none: as the checkpoint has them)", str, None,
        choices=(NONE, *RECIPES), flags=QUANT_FLAGS,
    )  # fmt: skip
    quant_head: str = _artifact(
        NONE, "recipe that rounds the weights of the output projection (none)", str, None, choices=(NONE, *ROUNDED)
    )
    calibrate: Path | None = _artifact(
        None, "texts to calibrate gptq, awq, autoround, w8a8 or KV scales: JSON lines with a field text, or plain text",
        Path, "FILE", commands=("compile",),
    )  # fmt: skip
    group_size: int | None = _artifact(None, "columns of a weight that share a scale (the recipe's: int4 128)")
    deterministic: bool = _artifact(
        False, "use only kernels whose results have the same bits in every batch and every chunk of a prompt", None,
        None, commands=("compile",),
    )  # fmt: skip
    layers: int | None = _artifact(None, "number of layers to compile, from the first, for a quick build (all)")
    tuning: Path | None = _path("measurements of llmc tune that choose kernels (records shipped with llmc)", "FILE")
    cache: Path | None = _path("cache of kernels and artifacts (~/.cache/llmc)", "DIR")
    reuse: bool = option(
        True, "neither read nor write whole artifacts in the cache, only kernels", read=None,
        flags=("--no-reuse",), commands=COMPILE_AND_TUNE, group=FILES,
    )  # fmt: skip
    hub: Hub = field(default=PUBLIC)

    def recorded(self) -> dict[str, Any]:
        """Return the options that determine the contents of the artifact, as its report records them: files by name."""
        values = {name: getattr(self, name) for name, o in options_of(Options).items() if o.group != FILES}
        draft = self.draft or ""
        prefix, _, path = draft.rpartition(":") if draft.startswith(EAGLE) else ("", "", draft)
        if path and Path(path).is_dir():
            values["draft"] = f"{prefix}:{Path(path).resolve().name}" if prefix else Path(path).resolve().name
        return {name: value.name if isinstance(value, Path) else value for name, value in values.items()}


def add_options(p: argparse.ArgumentParser, command: str) -> None:
    """Add the flags of the options of `command` ("compile" or "tune"), and those of the hub."""
    groups: dict[str, Any] = {}
    for declared in of_command(options_of(Options).values(), command):
        group = groups.get(declared.group) or p.add_argument_group(declared.group)
        groups[declared.group] = group
        if declared.name == "target":
            declared = replace(declared, text=f"{declared.text}: {', '.join(EXTENSION.targets)}, or an extension's")
        declared.add_to(group)
    groups[FILES].add_argument("--no-cache", action="store_true", help="neither read nor write the cache")
    add_hub_options(p)


def add_hub_options(p: argparse.ArgumentParser) -> None:
    """Add the flags for looking up and downloading a model by its hub id."""
    group = p.add_argument_group("models by hub id (owner/name@revision)")
    for declared in options_of(Hub).values():
        declared.add_to(group)
    group.add_argument(
        "--trust-remote-code", action="store_true", help="rejected: code from a model repository is never executed"
    )


def add_output(p: CommandParser, text: str) -> None:
    """Add the folder that a command writes, in both spellings: a second argument, or -o (--output)."""
    p.add_argument("output", nargs="?", metavar="OUTPUT", help=f"{text}; the same as -o")
    p.add_argument("-o", "--output", dest="output_flag", metavar="DIR", help=text)
    p.late = "output"


def read_output(args: argparse.Namespace) -> str:
    """Return the folder of `add_output`, "" if it is absent; ends with a usage error if it is given twice."""
    if args.output and args.output_flag:
        args.usage_error(f"the output is given twice, as {args.output} and as -o {args.output_flag}")
    return str(args.output or args.output_flag or "")


def read_hub(args: argparse.Namespace) -> Hub:
    """Return the Hub of parsed flags; raises Diagnostic E304 for --trust-remote-code."""
    if args.trust_remote_code:
        raise refuse_code("--trust-remote-code")
    return Hub(**_values(Hub, args))


def read_options(args: argparse.Namespace, default_cache: Path) -> Options:
    """Return the Options of parsed flags; `default_cache` is used unless --cache or --no-cache is given."""
    options = Options(**_values(Options, args), hub=read_hub(args))
    return replace(options, cache=None if args.no_cache else options.cache or default_cache)


def _values(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed values of `owner`'s options; options without a flag of this command keep their defaults."""
    return {name: o.value(args) for name, o in options_of(owner).items() if o.dest in args}


def random_seed(weights: str) -> int | None:
    """Return the seed of "random:SEED", or None for "packed" and "none". Raises Diagnostic E127 for other texts."""
    kind, colon, seed = weights.partition(":")
    if kind == "random" and seed.isdigit():
        return int(seed)
    if colon or kind not in ("packed", "none"):
        raise Diagnostic("E127", f"unknown value --weights {weights!r}", "use packed, none or random:SEED")
    return None


def check_values(o: Options) -> None:
    """Raise LlmcError E201 for a value that is not one of its option's choices, or a limit above MAX_LIMITS."""
    for name, declared in options_of(Options).items():
        declared.checked(getattr(o, name))
    for name, maximum in MAX_LIMITS.items():
        if (value := getattr(o, name) or 0) > maximum:
            raise LlmcError("E201", f"{name} = {value} is too large", f"set it to at most {maximum}")
