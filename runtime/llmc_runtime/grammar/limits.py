"""Limits on the cost of grammars, for the grammar processes and for llguidance itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMPILE_CPU_SECONDS = 4.0  # per compilation; the process is killed if it exceeds this
COMPILE_SECONDS = 60.0  # wall time of one compilation, for a heavily loaded machine
QUEUE_SECONDS = 10.0  # maximum wait of a request for its compilation to start
MEMORY_BYTES = 256 << 20  # bytes that a grammar process may allocate beyond the vocabulary
OPERATION_CPU_SECONDS = 1.0  # CPU time to accept a token and compute a mask; the process is killed if it exceeds this
OPERATION_SECONDS = 30.0  # wall time of the same
GUIDE_CPU_SECONDS = 2.0  # CPU time per output, to which TOKEN_CPU_SECONDS is added for each of its tokens
TOKEN_CPU_SECONDS = 0.02
# CPU time to compute masks after drafts: per output, and for each of its tokens.
LOOK_CPU_SECONDS = 0.2
LOOK_TOKEN_CPU_SECONDS = 0.01
VOCABULARY_SECONDS = 120.0  # timeout for building the vocabulary, once per process

MAX_COMPILATIONS = 4  # concurrent compilations
MAX_TENANT_COMPILATIONS = 2  # maximum concurrent compilations per tenant
MAX_PROCESSES = 256  # maximum number of grammar processes
MAX_TENANT_PROCESSES = 192  # maximum number of grammar processes with guides, or that compile, per tenant
TENANT_BYTES = 1 << 30  # memory of all compiled grammar processes of one tenant, also while they grow
GROWTH_BYTES = 8 << 20  # growth of a process after which it reports its memory again
MEASURED_OPERATIONS = 16  # operations between two measurements of a process's memory
FREE_BYTES = 4 << 20  # bytes that a process may use regardless of the tenant's total
MAX_KEPT = 16  # processes kept without guides
KEPT_BYTES = 64 << 20  # private memory above which a process without guides is not kept
MAX_UNSENT = 4096  # operations that wait for a process to read
MAX_GUIDES = 16  # guides per process, before another process is started for the same grammar
MAX_EAGER_GUIDES = 1024  # open guides below which first masks are computed before the request is scheduled
MAX_REFUSALS = 4096  # rejected grammars to remember
NICE = 19  # the engine and the server take precedence

# llguidance's own limits. They bound one operation: about 20 ms for the first lexer, 15 ms of lexing and 50,000 parser
# items for a mask, 20 MB of lexer states.
PARSER_LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_items_in_row": 2_000,
        "max_lexer_states": 10_000,
        "max_grammar_size": 200_000,
        "verbose_errors": False,
    }
)
