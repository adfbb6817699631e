"""What a grammar may cost: limits of the grammar processes and of llguidance itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMPILE_CPU_SECONDS = 4.0  # of one compilation; the process is killed when it passes them
COMPILE_SECONDS = 60.0  # wall time of one compilation, for a machine that has no processor to spare
QUEUE_SECONDS = 10.0  # that a request waits for its compilation to begin
MEMORY_BYTES = 256 << 20  # that a grammar process may allocate beside the vocabulary
OPERATION_CPU_SECONDS = 1.0  # of one token accepted and its mask; the process is killed when it passes them
OPERATION_SECONDS = 30.0  # wall time of the same
GUIDE_CPU_SECONDS = 2.0  # of one output, and for each of its tokens:
TOKEN_CPU_SECONDS = 0.02
VOCABULARY_SECONDS = 120.0  # that the vocabulary may take to build, once a process

SLOTS = 4  # compilations at a time
LANE = 2  # of these of one tenant
WORKERS = 256  # grammar processes
TENANT_BYTES = 1 << 30  # of memory of all grammar processes of one tenant, when they have compiled
SMALL_BYTES = 32 << 20  # that a process may use whatever the others of its tenant do
KEPT = 16  # of these without a guide
KEPT_BYTES = 64 << 20  # private memory above which a process without guides is not kept
GUIDES = 16  # of one process, before the same grammar gets another one
EAGER = 1024  # guides whose first mask is computed before their request is scheduled
REFUSALS = 4096  # refused grammars that are remembered
NICE = 19  # the engine and the server go first

# llguidance's own counters. They bound one operation: about 20 ms for the first lexer, 15 ms of lexing and 50,000
# parser items for a mask, 20 MB of lexer states.
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
