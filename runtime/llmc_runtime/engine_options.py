"""The options of an engine, each declared once: keywords of LLM and AsyncLLM, flags, YAML keys, the Open message."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from llmc_runtime.defaults import parse_override
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import GENERATE, MAX_RANKS, TASKS
from llmc_runtime.heartbeat import HEARTBEAT_TIMEOUT
from llmc_runtime.host_info import default_threads, usable_cpus
from llmc_runtime.option_type import (
    count,
    in_range,
    not_allowed,
    option,
    optional_switch,
    options_of,
    parse_bytes,
    positive,
    switch,
)
from llmc_runtime.speculate_option import (
    DEFAULT_DRAFTS,
    TOKENS,
    check_speculate,
    draft_option,
    parse_speculate,
    with_draft_model,
)
from llmc_runtime.vllm_keywords import KeywordChecks

if TYPE_CHECKING:
    from llmc_runtime.format.manifest import Manifest

MAX_THREADS = 1024
MAX_ENGINES = 64
MAX_ITL_MS = 60_000
_DTYPES: Mapping[str, str] = MappingProxyType({"float32": "f32", "bfloat16": "bf16"})  # "auto" is any
SIZES = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")  # limits that a compile fixes
_AUTO = ("auto", "-1", -1)  # vLLM's values for the longest sequence that fits
MP, RAY = "mp", "ray"  # launchers of the ranks of an engine
_SERVE, _RUN, _BOTH = ("serve",), ("run",), ("serve", "run")
_COMPILE = ("serve", "compile")


def _integer(code: str, low: int = 0, high: int = 0) -> Any:
    """Return a check for None or an integer from `low` to `high`, with this error code. Without bounds the range is
    checked when the model opens."""
    allowed = f"a whole number, {low} to {high}" if high else "a whole number"

    def check(name: str, value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, Integral) and not isinstance(value, bool) and (not high or low <= int(value) <= high):
            return int(value)
        raise not_allowed(name, value, f"set {name} to {allowed}", code)

    return check


def _length(name: str, value: Any) -> int | None:
    """Return a number of tokens, None for auto and -1."""
    automatic = isinstance(value, str | int) and value in _AUTO
    return None if automatic else _integer("E204")(name, value)


def _parse_length(text: str) -> int | None:
    return None if text.strip() in _AUTO else count(text)


def _seed(name: str, value: Any) -> int:
    """Return a 64-bit integer, a random one for None."""
    if value is None:
        return random.SystemRandom().getrandbits(63)
    return int(_integer("E201", -(1 << 63), (1 << 64) - 1)(name, value))


def _engines(name: str, value: Any) -> int:
    return int(_integer("E201", 1, MAX_ENGINES)(name, 1 if value is None else value))


def _path(name: str, value: Any) -> str | Path | None:
    if value is None or (isinstance(value, str | Path) and str(value)):
        return value
    raise not_allowed(name, value, f"set {name} to a path")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def to_stderr(line: str) -> None:
    """Print a log line to stderr. A stderr that is closed or full is ignored."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"llmc: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class EngineOptions(metaclass=KeywordChecks):
    """The options of an engine. Raises LlmcError E201 and E204 for values that are not allowed, and E648 for options of
    vLLM that are not supported.

    `model` is an artifact, or a Hugging Face folder or id (owner/name), which is compiled first.
    """

    model: str | Path
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV cache, for example 512M or 2GiB (default: half of the free memory, 0.9 of a GPU's)",
        commands=_BOTH, flags=("--kv-cache-memory-bytes", "--kv-cache-memory"), read=parse_bytes, metavar="BYTES",
        check=_integer("E201"), engine=True,
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "maximum length of a sequence in tokens (default, auto or -1: the model's)", commands=_COMPILE,
        read=_parse_length, metavar="N", check=_length, engine=True,
    )  # fmt: skip
    max_num_seqs: int | None = option(
        None, "maximum number of sequences that run at a time (default: the artifact's)", commands=_SERVE,
        read=positive, metavar="N", check=_integer("E204"), engine=True,
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, "maximum number of tokens in a step (default: the artifact's)", commands=_SERVE, read=count,
        metavar="N", check=_integer("E204"), engine=True,
    )  # fmt: skip
    target_itl_ms: float | None = option(
        None, "target duration in milliseconds of steps that compute prompts while others decode; prompts are cut "
        "into chunks that fit, by measured step times; 0: no target (default: 20; with --max-num-batched-tokens, and "
        "in LLM, no target)", commands=_SERVE, read=float, metavar="MS",
        check=in_range(0, MAX_ITL_MS, optional=True), engine=True,
    )  # fmt: skip
    threads: int | None = option(
        None, "number of CPU threads of each rank (default: physical cores)", commands=_BOTH, read=positive,
        metavar="N", check=_integer("E201", 1, MAX_THREADS), engine=True,
    )  # fmt: skip
    data_parallel_size: int = option(
        1, "number of engine processes, each with a KV cache and, on GPUs, a GPU of its own; by default they divide "
        "the CPU's cores and memory. Other options of the engine are per process", commands=_SERVE,
        flags=("--data-parallel-size", "-dp"), read=positive, metavar="N", check=_engines, engine=True,
    )  # fmt: skip
    tensor_parallel_size: int | None = option(
        None, "number of ranks, the processes that compute each step together: the artifact's (default), or the number "
        "for which a folder is compiled", commands=_BOTH, flags=("--tensor-parallel-size", "-tp"), read=positive,
        metavar="N", check=_integer("E201", 1, MAX_RANKS),
    )  # fmt: skip
    distributed_executor_backend: str = option(
        MP, "launcher of the ranks: mp (processes of this machine) or ray (actors of a Ray cluster on this machine)",
        commands=_BOTH, choices=(MP, RAY), engine=True,
    )  # fmt: skip
    seed: int | None = option(
        0, "seed from which the seeds of requests without one are derived (0; None in Python: random)", commands=_SERVE,
        read=int, metavar="N", check=_seed, engine=True,
    )  # fmt: skip
    enable_prefix_caching: bool | None = option(
        None, "reuse the KV cache of common prefixes (default: on)", commands=_SERVE, read=None, negated=True,
        check=optional_switch, engine=True,
    )  # fmt: skip
    state_snapshots: int | None = option(
        None, "number of snapshots of the states of recurrent layers, at which cached prefixes can be reused (default: "
        "two per sequence, in up to a quarter of the KV cache's memory; 0: no prefix caching for such a model)",
        commands=_SERVE, read=int, metavar="N", check=_integer("E201", 0, 1 << 20), engine=True,
    )  # fmt: skip
    scheduling_policy: str = option(
        "fcfs", "order of waiting requests: fcfs (by arrival; default) or priority (smaller values first)",
        commands=_SERVE, choices=("fcfs", "priority"), engine=True,
    )  # fmt: skip
    speculate: Mapping[str, Any] | str | None = option(
        None, "method of speculative decoding, with the maximum number of drafted tokens K: ngram[:K] (prompt lookup), "
        "suffix[:K] (text that followed in this and earlier outputs), draft[:K] (a draft model), eagle[:K] or "
        "mtp[:K] (a head or layer), the method of an installed package, off (default), or vLLM's JSON, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}. Needs an artifact compiled with --speculate K; for draft, '
        "eagle and mtp, one with --draft, or --draft-model",
        commands=_BOTH, flags=("--speculate", "--speculative-config"), read=parse_speculate,
        metavar="METHOD[:K] or JSON", check=check_speculate, engine=True,
    )  # fmt: skip
    draft_model: str | Path | None = option(
        None, "artifact of a draft model (llmc compile --drafts-for MODEL.llmc), which drafts instead of one in the "
        "model's artifact; implies --speculate draft", commands=_BOTH, read=Path, metavar="ARTIFACT", check=_path,
        engine=True,
    )  # fmt: skip
    deterministic: bool = option(
        False, "require an artifact whose results have the same bits in every batch (llmc compile --deterministic)",
        commands=_BOTH, read=None, check=switch,
    )  # fmt: skip
    chat_template: str | None = option(
        None, "file with a chat template (in Python its text), or the name of one of the model's templates",
        commands=_RUN, metavar="FILE|NAME", group="chats and sampling",
    )  # fmt: skip
    generation_config: str = option(
        "auto", "sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder with another "
        "such file", commands=_BOTH, metavar="auto|vllm|DIR", group="chats and sampling",
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] | None = option(
        None, 'sampling defaults that override those of --generation-config, such as {"temperature": 0.7}',
        commands=_BOTH, read=parse_override, metavar="JSON", group="chats and sampling",
    )  # fmt: skip
    target: str | None = option(
        None, "target for which a folder is compiled (cpu:native), or that an artifact must have",
        commands=_COMPILE,
    )  # fmt: skip
    dtype: str = option(
        "auto", "dtype of weights and activations for which a folder is compiled (auto: the checkpoint's), or that an "
        "artifact must have", commands=_COMPILE,
        choices=("auto", "float32", "bfloat16"),
    )  # fmt: skip
    task: str = option(
        "auto", "task for which a folder is compiled (auto: from its files), or that an artifact must have",
        commands=_COMPILE, choices=("auto", GENERATE, *TASKS),
    )  # fmt: skip
    cache_dir: str | Path | None = option(
        None, "folder for compiled models ($LLMC_CACHE, ~/.cache/llmc)", commands=_COMPILE, flags=("--cache",),
        read=Path, metavar="DIR",
    )  # fmt: skip
    verify: bool = option(
        True, "check the weights' hashes at startup (--no-verify skips this)", commands=_RUN,
        flags=("--no-verify",), read=None, check=switch, engine=True,
    )  # fmt: skip
    canary: bool = option(
        False, "compare results with the recorded canary before the first request", commands=_BOTH, read=None,
        check=switch, engine=True,
    )  # fmt: skip
    prepare: bool = option(
        False, "build device graphs (on GPUs) and the vocabulary of grammars at startup", commands=_BOTH, read=None,
        check=switch, engine=True,
    )  # fmt: skip
    trace: str | Path | None = option(
        None, "file for a trace of the engine's steps, for ui.perfetto.dev", commands=_RUN, read=Path, metavar="FILE",
        engine=True,
    )  # fmt: skip
    heartbeat_timeout: float = option(
        HEARTBEAT_TIMEOUT, "seconds without a heartbeat after which the process of an engine or of a rank counts as "
        "hung; five times as many while it is runnable but gets no CPU time", check=in_range(0.1), engine=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        speculate, draft = with_draft_model(self.speculate, self.draft_model)
        object.__setattr__(self, "speculate", speculate)
        object.__setattr__(self, "draft_model", draft)
        for declared in options_of(type(self)).values():
            object.__setattr__(self, declared.name, declared.checked(getattr(self, declared.name)))
        if self.data_parallel_size > 1 and self.trace is not None:
            cause = f"trace is one file, and data_parallel_size = {self.data_parallel_size}"
            raise LlmcError("E201", cause, "trace one engine, or use /admin/trace of llmc-serve")

    @classmethod
    def of_keywords(cls, model: str | Path, values: Mapping[str, Any], say: Callable[[str], None]) -> Self:
        """Return the options of a call such as LLM(model, **values).

        Keywords of vLLM that have no meaning here are reported by `say`. Raises LlmcError E648 for those that would
        change responses and for unknown ones, E201 and E204 for values that are not allowed.
        """
        return cls(model, **cls.without_unknown(values, say))

    @classmethod
    def without_unknown(cls, values: Mapping[str, Any], say: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Return the options among the keywords, by their names; the others are treated as in `of_keywords`.

        `say` defaults to a line on stderr.
        """
        options = options_of(cls)
        by_flag = {  # keywords that are other spellings of the flag, such as speculative_config
            flag.removeprefix("--").replace("-", "_"): name
            for name, declared in options.items()
            for flag in declared.spellings
        }
        values = {k if k in options else by_flag.get(k, k): v for k, v in values.items()}
        known = cls.__dataclass_fields__.keys()
        if unknown := {k: v for k, v in values.items() if k not in known}:
            from llmc_runtime.ignored_options import check_keywords  # a large table, which few calls need

            for message in check_keywords(unknown, options):
                (say or to_stderr)(message)
        return {k: v for k, v in values.items() if k in known}

    def check_artifact(self, manifest: Manifest) -> None:
        """Check the options if the model is this artifact. Raises LlmcError E204 if it was compiled for another target,
        dtype or task, or without --deterministic; E207 if it was compiled for another number of ranks, or Ray cannot
        place them; E201 if there are fewer CPUs than engines."""
        target, dtype = manifest.target.name, manifest.kv.dtype
        if self.target is not None and self.target.partition("+")[0] != target.partition("+")[0]:
            cause = f"{self.model} was compiled for {target}, not for target={self.target!r}"
            raise LlmcError("E204", cause, "leave target out, or compile the model for that target")
        if self.deterministic and not manifest.deterministic:
            cause = f"{self.model} was compiled without --deterministic: results depend on the batch"
            raise LlmcError("E204", cause, "leave deterministic out, or compile the model with --deterministic")
        required = _DTYPES.get(self.dtype, dtype)
        if dtype in _DTYPES.values() and required != dtype:
            cause = f"{self.model} computes in {dtype}, not in dtype={self.dtype!r}"
            raise LlmcError("E204", cause, "leave dtype out, or compile the model with that dtype")
        task = manifest.pooling.task if manifest.pooling else GENERATE
        if self.task not in ("auto", task):
            cause = f"the task of {self.model} is {task}, not task={self.task!r}"
            raise LlmcError("E204", cause, f"leave task out, or compile the model with --task {self.task}")
        if self.tensor_parallel_size not in (None, manifest.ranks):
            required = f"tensor_parallel_size = {self.tensor_parallel_size}"
            cause = f"{self.model} was compiled for {_ranks(manifest.ranks)}, and {required}"
            remedy = f"leave it out, or compile with --tensor-parallel-size {self.tensor_parallel_size}"
            raise LlmcError("E207", cause, remedy)
        if self.distributed_executor_backend == RAY and (manifest.ranks == 1 or not target.startswith("cpu:")):
            cause = f"Ray places ranks on CPUs; {self.model} is for {target} and has {_ranks(manifest.ranks)}"
            raise LlmcError("E207", cause, "leave distributed_executor_backend out, or compile with several ranks")
        engines, cpus = self.data_parallel_size, usable_cpus()
        if target.startswith("cpu:") and engines > max(1, cpus):
            cause = f"data_parallel_size = {engines}: an engine needs a CPU of its own, and this process may use {cpus}"
            raise LlmcError("E201", cause, f"set data_parallel_size to at most {cpus}")

    def opening_line(self, path: str | Path) -> str:
        """Return the log line about opening the artifact at `path`."""
        return f"opening {path}" + (f" with the draft model {self.draft_model}" if self.draft_model else "")

    @property
    def engine_threads(self) -> int:
        """The number of threads of each engine: `threads`, or its part of the physical cores."""
        return self.rank_threads(1)

    def rank_threads(self, ranks: int) -> int:
        """Return the number of threads of each rank of engines with this number of ranks."""
        return self.threads or max(1, default_threads() // (self.data_parallel_size * ranks))

    @property
    def compile_options(self) -> dict[str, str]:
        """The options of `llmc compile`, for a `model` that is a Hugging Face folder."""
        sizes = {name.replace("_", "-"): getattr(self, name) for name in SIZES}
        if isinstance(self.speculate, Mapping):
            sizes["speculate"] = self.speculate[TOKENS] or DEFAULT_DRAFTS
            sizes["draft"] = None if self.draft_model else draft_option(self.speculate)
        sizes["tensor-parallel-size"] = self.tensor_parallel_size
        options = {"target": self.target or "cpu:native", "dtype": self.dtype}
        options |= {"deterministic": ""} if self.deterministic else {}
        options |= {"task": self.task} if self.task != "auto" else {}
        return options | {k: str(v) for k, v in sizes.items() if v is not None}

    def message(self) -> dict[str, Any]:
        """Return the options that the engine process needs and that are not the default. Paths are percent-encoded."""
        from llmc_runtime.python_command import quoted  # it imports what starts processes, which LLM does not

        values = {}
        for declared in options_of(EngineOptions).values():
            value = getattr(self, declared.name)
            if declared.engine and value != declared.default:
                values[declared.name] = quoted(value) if declared.read is Path else value
        return values

    @classmethod
    def of_message(cls, model: str, values: Mapping[str, Any]) -> EngineOptions:
        """Return the options of a `message`. `model` and paths are percent-encoded."""
        from llmc_runtime.python_command import unquoted

        known = options_of(EngineOptions)
        read: dict[str, Any] = {k: unquoted(v) if known[k].read is Path else v for k, v in values.items()}
        return cls(unquoted(model), **read)
