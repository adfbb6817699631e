"""The errors of requests whose grammar processes end or cannot start."""

from __future__ import annotations

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.host_process import exceeded_limit
from llmc_runtime.grammar.limits import COMPILE_SECONDS, OPERATION_SECONDS, TENANT_BYTES


def unavailable(cause: str, remedy: str = "send the request again in a moment") -> LlmcError:
    """Return E653: there is no capacity now."""
    return LlmcError("E653", cause, remedy)


def failed(cause: str) -> LlmcError:
    """Return E652: an output cannot continue."""
    return LlmcError("E652", cause, "correct or simplify the grammar, or use other prompts")


def gone() -> LlmcError:
    """Return E653: the process that follows the output has ended."""
    return unavailable("the process that compiles grammars has ended")


def refused(kind: str, reason: str) -> LlmcError:
    """Return E651: the grammar of this kind is invalid or too large."""
    return LlmcError("E651", f"structured_outputs: {kind} is refused: {reason}", "correct or simplify it")


def unusable(reason: str) -> LlmcError:
    """Return E651: there can be no grammars over this vocabulary."""
    cause = f"llguidance cannot use the model's tokenizer: {reason}"
    return LlmcError("E651", cause, "use another model for structured outputs")


def too_much_memory() -> LlmcError:
    """Return E653: the grammars of a tenant exceed TENANT_BYTES."""
    cause = f"the grammars of this tenant use {TENANT_BYTES >> 20} MiB of memory already"
    return unavailable(cause, "send the request again when others have ended")


def compile_error(kind: str, killed: bool, status: int) -> LlmcError:
    """Return the error of a process that ended before its grammar was compiled, with this wait status; `killed`: for
    COMPILE_SECONDS."""
    if killed:
        cause = f"the grammar was not compiled within {COMPILE_SECONDS:g} s"
        return unavailable(cause, "send the request again when the server has less to do")
    limit = exceeded_limit(status, compiled=False)
    return gone() if limit is None else refused(kind, f"it needs more than {limit}")


def output_error(killed: bool, status: int) -> LlmcError:
    """Return the error of the outputs of a process that ended with this wait status; `killed`: for OPERATION_SECONDS.

    Then it was below its limit of CPU time, so that others kept the processors.
    """
    if killed:
        cause = f"the grammar process got too little CPU time for a token within {OPERATION_SECONDS:g} s"
        return unavailable(cause, "send the request again when the server has less to do")
    limit = exceeded_limit(status, compiled=True)
    return failed("the grammar process has ended" if limit is None else f"the grammar needs more than {limit}")
