"""vLLM's options that have no meaning here: ignored with a message, or refused if they would change responses.

One table serves the flags of llmc-serve, the keys in its file, and the keywords of LLM and AsyncLLM.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.nearest import did_you_mean
from llmc_runtime.format.row_abi import TOP_LOGPROBS


@dataclass(frozen=True)
class IgnoredFlags:
    """Flags of another engine, separated by spaces in `names`, and the `reason` that is reported.

    `values` is "" for switches, "1" for flags with one value, else argparse's nargs. The flags are ignored with one of
    the values in `harmless` (None: any), else refused.
    """

    names: str
    reason: str
    values: str = "1"
    harmless: tuple[str, ...] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags."""
        return tuple(self.names.split())

    @property
    def negations(self) -> tuple[str, ...]:
        """Of switches, the flags that turn them off, which changes nothing."""
        switches = self.flags if self.values == "" else ()
        return tuple(flag.replace("--", "--no-", 1) for flag in switches if not flag.startswith("--no-"))


def _switch(names: str, reason: str) -> IgnoredFlags:
    return IgnoredFlags(names, reason, "")


def _refused(names: str, reason: str, *harmless: str, values: str = "1") -> IgnoredFlags:
    return IgnoredFlags(names, reason, values, harmless)


_AHEAD = "programs and device graphs are fixed at compile time"
_CHUNKS = "prompts are always processed in chunks"
_KERNELS = "kernels and page size are fixed in the artifact"
_NO_PIPELINE = "pipeline parallelism is not supported: use --tensor-parallel-size"
_NO_CONTEXT = "context parallelism is not supported: use --tensor-parallel-size"
_DRAFTS = """use --speculative-config, such as '{"method": "ngram", "num_speculative_tokens": 4}'"""
_ONE_FRONT = "one process answers HTTP for all engines; for more, start servers behind a load balancer"
_COMPILED = "fixed at compile time: compile another artifact"
_FILES = "the artifact has its own, from the model's folder: change it there, and compile again"
NO_ADAPTERS = "adapters are not supported: merge them into the weights, and compile"
_ONE_MACHINE = "engines run on one machine: for more machines, start a server on each, behind a router"
_EXPERTS = "tensor parallelism divides every expert"
_STATES = "states of recurrent layers are float32, and --state-snapshots sets how many are kept"
_NO_CODE = "the server loads no external code"
_READ = "weights are read from the artifact's own files"
_HOST = "weights and the KV cache stay on the device"
_TASK = "use --task generate, embed or classify"
_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
_GRAMMARS = "llguidance compiles all grammars; set options of a grammar in the request's structured_outputs"

IGNORED = (
    _switch("--enable-chunked-prefill --no-enable-chunked-prefill", _CHUNKS),
    _switch("--async-scheduling --no-async-scheduling", "on GPUs, the next step is always planned while a step runs"),
    _switch("--disable-hybrid-kv-cache-manager --no-disable-hybrid-kv-cache-manager", "all pages are of one kind"),
    _switch("--enforce-eager", _AHEAD),
    IgnoredFlags("--cuda-graph-sizes --cudagraph-capture-sizes", _AHEAD, "+"),
    IgnoredFlags("--max-cudagraph-capture-size --max-seq-len-to-capture --compilation-config -O -cc", _AHEAD),
    IgnoredFlags("--attention-backend --attention-config -ac --block-size --kernel-config --moe-backend", _KERNELS),
    IgnoredFlags("--optimization-level --performance-mode", _KERNELS),
    IgnoredFlags("--model-loader-extra-config --safetensors-load-strategy --ignore-patterns", _READ),
    IgnoredFlags("--mamba-block-size --mamba-cache-mode", _STATES),
    IgnoredFlags(
        "--gpu-memory-utilization --num-gpu-blocks-override",
        "use --kv-cache-memory-bytes to set the size of the KV cache",
    ),
    IgnoredFlags("--swap-space --cpu-offload-gb --kv-offloading-size --kv-offloading-backend", _HOST),
    IgnoredFlags("--max-parallel-loading-workers", "--threads sets the number of threads that load weights"),
    _switch("--worker-use-ray --engine-use-ray --ray-workers-use-nsight", "see --distributed-executor-backend"),
    IgnoredFlags("--data-parallel-backend", "--distributed-executor-backend selects what starts ranks"),
    _switch("--use-v2-block-manager --disable-async-output-proc", "the engine has a single implementation"),
    IgnoredFlags(
        "--num-scheduler-steps --num-lookahead-slots --scheduler-delay-factor", "steps are planned one by one"
    ),
    IgnoredFlags("--preemption-mode", "preempted requests are computed again"),
    IgnoredFlags("--tokenizer-pool-size --tokenizer-pool-type", "texts are tokenized in processes of their own"),
    _switch("--disable-frontend-multiprocessing", "the engine always runs in its own process"),
    IgnoredFlags("--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb", "prompts are text"),
    IgnoredFlags("--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-processor-cache-type", "prompts are text"),
    IgnoredFlags("--media-io-kwargs --renderer-num-workers", "prompts are text"),
    _switch("--skip-mm-profiling --language-model-only --interleave-mm-strings", "prompts are text"),
    _switch("--disable-mm-preprocessor-cache --disable-chunked-mm-input", "prompts are text"),
    IgnoredFlags("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype", "adapters are not supported"),
    _switch("--fully-sharded-loras", "adapters are not supported"),
    IgnoredFlags("--download-dir --code-revision", "nothing is downloaded while serving"),
    _switch("--disable-log-requests", "prompts are logged only with --enable-log-requests"),
    _switch("--enable-auto-tool-choice --exclude-tools-when-tool-choice-none", "always on"),
    _switch("--enable-reasoning", "reasoning is always separated if the model marks it"),
    _switch("--disable-log-stats", "statistics are at /metrics"),
    IgnoredFlags("--max-log-len --uvicorn-log-level", "--log-level sets what is logged"),
    IgnoredFlags("--log-config-file", "--log-level and --log-format configure the log"),
    _switch("--enable-log-outputs --enable-log-deltas", "texts of responses are never logged"),
    _switch("--log-error-stack", "--log-level debug logs the traceback of errors"),
    IgnoredFlags("--disable-access-log-for-endpoints", "--disable-access-log leaves out the lines of all requests"),
    IgnoredFlags("--show-hidden-metrics-for-version", "no metric is hidden"),
    IgnoredFlags("--collect-detailed-traces", "/admin/trace records the engine's loop"),
    IgnoredFlags("--stream-interval", "tokens are sent as they arrive, in larger chunks to slow clients"),
    IgnoredFlags("--long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills", _CHUNKS),
    _switch("--disable-cascade-attn", _KERNELS),
    IgnoredFlags("--prefix-caching-hash-algo", "prefixes are identified by SHA-256 and compared token by token"),
    _switch("--enable-expert-parallel --enable-eplb --enable-dbo", _EXPERTS),
    IgnoredFlags("--all2all-backend --eplb-config --num-redundant-experts --expert-placement-strategy", _EXPERTS),
    IgnoredFlags("--dbo-decode-token-threshold --dbo-prefill-token-threshold", _EXPERTS),
    IgnoredFlags("--config-format", "the artifact has its own format"),
    _switch("--enable-tokenizer-info-endpoint", "/tokenizer_info is always enabled"),
    _switch("--enable-sleep-mode", "sleep mode is not supported; a start takes seconds"),
    _switch("--enable-request-id-headers", "responses always have X-Request-Id"),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details"),
    _switch(
        "--enable-server-load-tracking --disable-fastapi-docs", "/load always works, and there are no pages of FastAPI"
    ),
    _switch("--disable-custom-all-reduce", "collectives are kernels of the artifact"),
    IgnoredFlags("--allowed-local-media-path --allowed-media-domains", "prompts are text"),
    IgnoredFlags("--hf-token", "models are downloaded with the token in HF_TOKEN, or that of `hf auth login`"),
    _switch("--use-tqdm-on-load", "progress is in the log"),
    IgnoredFlags("--profiler-config", "/admin/trace records the engine's loop"),
    IgnoredFlags("--h11-max-incomplete-event-size --h11-max-header-count", "the limits on headers are fixed"),
)
REFUSED = (
    _refused("--pipeline-parallel-size -pp", _NO_PIPELINE, "1"),
    _refused("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp", _NO_CONTEXT, "1"),
    _refused("--nnodes", _ONE_MACHINE, "1"),
    _refused("--node-rank --data-parallel-rank -dpn --data-parallel-start-rank -dpr", _ONE_MACHINE, "0"),
    _refused("--data-parallel-size-local -dpl --data-parallel-address -dpa", _ONE_MACHINE),
    _refused("--data-parallel-rpc-port -dpp --master-addr --master-port", _ONE_MACHINE),
    _refused("--headless --data-parallel-hybrid-lb --data-parallel-external-lb", _ONE_MACHINE, values=""),
    _refused("--api-server-count -asc", _ONE_FRONT, "1"),
    _refused("--device", "fixed at compile time: llmc compile --target NAME", "auto"),
    _refused("--mamba-cache-dtype --mamba-ssm-cache-dtype", _STATES, "auto", "float32"),
    _refused("--speculative-model --num-speculative-tokens", _DRAFTS),
    _refused("--ngram-prompt-lookup-max --ngram-prompt-lookup-min", _DRAFTS),
    _refused("--quantization -q", _COMPILED, "none", "None"),
    _refused("--kv-cache-dtype", _COMPILED, "auto"),
    _refused("--load-format", _COMPILED, "auto", "safetensors"),
    _refused("--rope-theta --hf-config-path --tokenizer --tokenizer-revision", _FILES),
    _refused("--rope-scaling --hf-overrides", _FILES, "{}"),
    _refused("--disable-sliding-window", _FILES, values=""),
    _refused("--tokenizer-mode", _FILES, "auto"),
    _refused("--skip-tokenizer-init", "prompts of token ids need no tokenizer; leave it out", values=""),
    _refused("--logprobs-mode", "log-probabilities are those of the model, before penalties", "raw_logprobs"),
    _refused("--model-impl", "models are compiled from transformers", "auto", "transformers", "vllm"),
    _refused("--calculate-kv-scales", "compile with --kv-cache-dtype fp8 --calibrate FILE", values=""),
    _refused("--pooler-config --override-pooler-config", "fixed at compile time: llmc compile --pooling KIND", "{}"),
    _refused("--enable-prompt-embeds", "prompts are text or token ids", values=""),
    _refused("--additional-config", "there are no platform plugins", "{}"),
    _refused("--kv-transfer-config", "the KV cache stays in one engine"),
    _refused("--kv-events-config --ec-transfer-config", "the KV cache stays in one engine", "{}"),
    _refused("--revision", "name it with the model: llmc compile owner/name@REVISION -o DIR"),
    _refused("--trust-remote-code", "code of a model is never run; leave the flag out", values=""),
    _refused("--runner --convert", _TASK, "auto", "generate", "none"),
    _refused("--enable-lora", NO_ADAPTERS, values=""),
    _refused("--lora-modules", NO_ADAPTERS, values="+"),
    _refused("--logits-processors --middleware", _NO_CODE, values="+"),
    _refused("--tool-parser-plugin --reasoning-parser-plugin --logits-processor-pattern --scheduler-cls", _NO_CODE),
    _refused("--trust-request-chat-template", "requests have no templates: use --chat-template", values=""),
    _refused("--tool-server", "the server runs no tools: clients run them and send results"),
    _refused("--worker-cls --worker-extension-cls", _NO_CODE, "auto", ""),
    _refused("--guided-decoding-backend", _GRAMMARS, *_BACKENDS),
    _refused("--structured-outputs-config", _GRAMMARS, "{}", *(f'{{"backend": "{name}"}}' for name in _BACKENDS)),
    _refused("--max-logprobs", f"the maximum is {TOP_LOGPROBS}", *map(str, range(TOP_LOGPROBS + 1))),
    _refused("--chat-template-content-format", "content is text", "auto", "string"),
    _refused("--response-role", "the role of responses is assistant", "assistant"),
    _refused("--return-tokens-as-token-ids --enable-force-include-usage", "set it in the request", values=""),
    _refused("--allowed-methods --allowed-headers", "pages may use GET and POST, and send all headers", '["*"]'),
    _refused("--allow-credentials", "the server has no cookies; pages send keys in a header", values=""),
    _refused(
        "--api-key", "keys must not be on the command line: use --api-key-file FILE or --api-key-env NAME", values="+"
    ),
)  # fmt: skip


def by_flag() -> dict[str, IgnoredFlags]:
    """Return all of them, by flag. Switches that are turned off are ignored."""
    rows = (*IGNORED, *REFUSED)
    off = {flag: IgnoredFlags(flag, row.reason, "") for row in rows for flag in row.negations}
    return off | {flag: row for row in rows for flag in row.flags}


def check_ignored(flags: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Return a message for each of these flags with their values. Raises LlmcError E648 if one is refused."""
    rows, messages = by_flag(), []
    for flag, values in flags:
        shown = " ".join([flag, *values]) if flag != "--api-key" else flag
        messages.append(_message(rows[flag], shown, values))
    return messages


def check_keywords(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return a message for each of these keywords of an engine whose value is not None, False or an empty collection.

    Raises LlmcError E648 if one is refused, or is not a keyword of vLLM either; `known` are the names to suggest.
    """
    rows = {flag.removeprefix("--").replace("-", "_"): row for flag, row in by_flag().items()}
    messages = []
    for name, value in values.items():
        if name not in rows:
            remedy = did_you_mean(name, [*known, *rows], f"the options are {', '.join(sorted(known))}")
            raise LlmcError("E648", f"there is no option {name!r}", remedy)
        if value is None or value is False or (isinstance(value, Collection) and not value):
            continue
        shown = f"{name}={value!r:.60}" if name != "api_key" else name
        messages.append(_message(rows[name], shown, [value]))
    return messages


def _normal(value: object) -> str:
    """Return a value as text; JSON objects have one spelling, whether they are a text or a dict."""
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return json.dumps(parsed, default=str) if isinstance(parsed, dict) else str(value)


def _message(row: IgnoredFlags, shown: str, values: Sequence[Any]) -> str:
    """Return the message about an ignored flag or keyword with these values. Raises LlmcError E648 if it is refused."""
    if row.harmless is not None and (not row.harmless or not set(map(_normal, values)) <= set(row.harmless)):
        raise LlmcError("E648", f"{shown} is not supported and would change responses or access", row.reason)
    return f"{shown} is ignored: {row.reason}"
