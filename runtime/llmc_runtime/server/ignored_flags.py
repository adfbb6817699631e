"""vLLM's flags without meaning here, a closed list: passed over with a line, or refused where answers would change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmc_runtime.format.errors import LlmcError


class Elsewhere(NamedTuple):
    """`flags` take `values` ("": none, else argparse's nargs). With one of `harmless` (None: any) they are passed over,
    else refused; `why` is told in both cases."""

    flags: tuple[str, ...]
    values: str
    harmless: tuple[str, ...] | None
    why: str


def _both(name: str, why: str) -> Elsewhere:
    return Elsewhere((f"--{name}", f"--no-{name}"), "", None, why)


_AHEAD = "programs and device graphs are made ahead of time"
_ONE = ("1",)
_SPLIT = "an artifact runs on one device; start a server for each device, behind a load balancer"
_COMPILED = "it is fixed when the model is compiled: compile another artifact"
_FILES = "the artifact has its own, from the model's folder: change it there, and compile again"
_REQUEST = "requests say so themselves"
_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
_FORMS = "llguidance makes all grammars; what else there is to say, requests say in structured_outputs"

PASSED_OVER = (
    _both("enable-chunked-prefill", "prompts always run in chunks"),
    _both("async-scheduling", "steps are always planned while others run"),
    _both("disable-hybrid-kv-cache-manager", "there is one kind of page"),
    Elsewhere(("--enforce-eager",), "", None, _AHEAD),
    Elsewhere(("--cuda-graph-sizes", "--cudagraph-capture-sizes"), "+", None, _AHEAD),
    Elsewhere(("--max-cudagraph-capture-size", "--max-seq-len-to-capture"), "1", None, _AHEAD),
    Elsewhere(("--compilation-config", "-O", "-cc"), "1", None, _AHEAD),
    Elsewhere(("--attention-backend", "--block-size"), "1", None, "the artifact's kernels and pages are what they are"),
    Elsewhere(("--gpu-memory-utilization",), "1", None, "--kv-cache-memory-bytes says what the KV cache gets"),
    Elsewhere(("--num-gpu-blocks-override",), "1", None, "--kv-cache-memory-bytes says what the KV cache gets"),
    Elsewhere(("--swap-space", "--cpu-offload-gb"), "1", None, "nothing is moved between device and host"),
    Elsewhere(("--max-parallel-loading-workers",), "1", None, "--threads says how many read"),
    Elsewhere(("--distributed-executor-backend",), "1", None, "the engine is one process"),
    Elsewhere(("--disable-frontend-multiprocessing",), "", None, "the engine is always a process of its own"),
    Elsewhere(("--speculative-config",), "1", None, "there is no speculative decoding; answers are the same"),
    Elsewhere(("--limit-mm-per-prompt", "--mm-processor-kwargs"), "1", None, "prompts are text"),
    Elsewhere(("--max-loras", "--max-lora-rank", "--max-cpu-loras"), "1", None, "there are no adapters"),
    Elsewhere(("--download-dir", "--code-revision"), "1", None, "nothing is downloaded while serving"),
    Elsewhere(("--disable-log-requests",), "", None, "texts are not logged, unless --enable-log-requests"),
    Elsewhere(("--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none"), "", None, "that is always so"),
    Elsewhere(("--enable-reasoning",), "", None, "reasoning is told apart where the model marks it"),
    Elsewhere(("--disable-log-stats",), "", None, "figures are at /metrics"),
    Elsewhere(("--max-log-len", "--uvicorn-log-level"), "1", None, "--log-level says what is logged"),
    Elsewhere(("--log-config-file",), "1", None, "--log-level and --log-format say what is logged, and how"),
    Elsewhere(("--enable-log-outputs",), "", None, "texts of answers are never logged"),
    Elsewhere(("--otlp-traces-endpoint", "--collect-detailed-traces"), "1", None, "/admin/trace has the engine's loop"),
    Elsewhere(("--stream-interval",), "1", None, "pieces leave as they come, and grow where a client is slow"),
    Elsewhere(("--long-prefill-token-threshold",), "1", None, "prompts always run in chunks"),
    Elsewhere(("--max-num-partial-prefills", "--max-long-partial-prefills"), "1", None, "prompts always run in chunks"),
    Elsewhere(("--disable-cascade-attn",), "", None, "the artifact's kernels are what they are"),
    Elsewhere(("--prefix-caching-hash-algo",), "1", None, "prefixes are known by SHA-256, and their tokens compared"),
    Elsewhere(("--enable-expert-parallel",), "", None, "an artifact runs on one device"),
    Elsewhere(("--config-format",), "1", None, "the artifact has its own"),
    Elsewhere(("--enable-tokenizer-info-endpoint",), "", None, "/tokenizer_info is always there"),
    Elsewhere(("--enable-sleep-mode",), "", None, "nothing sleeps; a start takes seconds"),
    Elsewhere(("--enable-request-id-headers",), "", None, "X-Request-Id is always there"),
    Elsewhere(("--enable-prompt-tokens-details",), "", None, "usage always has prompt_tokens_details"),
    Elsewhere(("--enable-server-load-tracking", "--disable-fastapi-docs"), "", None, "there is nothing to switch"),
    Elsewhere(("--h11-max-incomplete-event-size", "--h11-max-header-count"), "1", None, "headers have fixed limits"),
)
REFUSED = (
    Elsewhere(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), "1", _ONE, _SPLIT),
    Elsewhere(("--data-parallel-size", "-dp", "--api-server-count", "-asc"), "1", _ONE, _SPLIT),
    Elsewhere(("--quantization", "-q"), "1", ("none", "None"), _COMPILED),
    Elsewhere(("--kv-cache-dtype",), "1", ("auto",), _COMPILED),
    Elsewhere(("--load-format",), "1", ("auto", "safetensors"), _COMPILED),
    Elsewhere(("--rope-scaling", "--rope-theta", "--hf-overrides", "--hf-config-path"), "1", (), _FILES),
    Elsewhere(("--disable-sliding-window",), "", (), _FILES),
    Elsewhere(("--tokenizer", "--tokenizer-revision"), "1", (), _FILES),
    Elsewhere(("--tokenizer-mode",), "1", ("auto",), _FILES),
    Elsewhere(("--revision",), "1", (), "name it with the model: llmc compile owner/name@REVISION -o DIR"),
    Elsewhere(("--trust-remote-code",), "", (), "no code of a model is ever run; leave it out"),
    Elsewhere(("--task", "--runner", "--convert"), "1", ("auto", "generate", "none"), "models here generate text"),
    Elsewhere(("--enable-lora",), "", (), "there are no adapters: merge them into the weights, and compile"),
    Elsewhere(("--lora-modules",), "+", (), "there are no adapters: merge them into the weights, and compile"),
    Elsewhere(("--logits-processors", "--middleware"), "+", (), "no code of others runs in the server"),
    Elsewhere(("--tool-parser-plugin",), "1", (), "no code of others runs in the server"),
    Elsewhere(("--guided-decoding-backend",), "1", _BACKENDS, _FORMS),
    Elsewhere(("--structured-outputs-config",), "1", tuple(f'{{"backend": "{one}"}}' for one in _BACKENDS), _FORMS),
    Elsewhere(("--max-logprobs",), "1", tuple(map(str, range(21))), "20 is the most"),
    Elsewhere(("--chat-template-content-format",), "1", ("auto", "string"), "content is text"),
    Elsewhere(("--response-role",), "1", ("assistant",), "answers are the assistant's"),
    Elsewhere(("--return-tokens-as-token-ids", "--enable-force-include-usage"), "", (), _REQUEST),
    Elsewhere(
        ("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials"), "?", (),
        "there are no CORS headers: put a proxy in front that adds them",
    ),
    Elsewhere(("--api-key",), "+", (), "keys are never on the command line: --api-key-file FILE or --api-key-env NAME"),
)  # fmt: skip


class _Note(argparse.Action):
    """Collects (flag, values) in `elsewhere`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        found = list(namespace.elsewhere or [])
        told = [values] if isinstance(values, str) else list(values or [])
        namespace.elsewhere = [*found, (option or self.option_strings[0], told)]


def add_elsewhere(parser: argparse.ArgumentParser) -> None:
    """The flags, hidden, so that a command line written for vLLM is understood."""
    counts: dict[str, int | str | None] = {"": 0, "1": None}
    for row in (*PASSED_OVER, *REFUSED):
        for flag in row.flags:
            parser.add_argument(
                flag, action=_Note, dest="elsewhere", nargs=counts.get(row.values, row.values), default=[],
                help=argparse.SUPPRESS,
            )  # fmt: skip


def judge(given: Sequence[tuple[str, list[str]]]) -> list[str]:
    """A line for each flag that is passed over. LlmcError E648 where one is refused."""
    rows = {flag: row for row in (*PASSED_OVER, *REFUSED) for flag in row.flags}
    lines = []
    for flag, values in given:
        row = rows[flag]
        words = " ".join([flag, *values]) if flag != "--api-key" else flag
        if row.harmless is not None and (not row.harmless or not set(values) <= set(row.harmless)):
            raise LlmcError("E648", f"{words} would change answers or access, and is not there", row.why)
        lines.append(f"{words} is passed over: {row.why}")
    return lines
