"""Structured outputs: llguidance in separate processes, with limits on CPU time, memory and wall time.

`Grammars` is the engine's side. A host process builds the vocabulary once and forks a worker per grammar and tenant; a
worker compiles its grammar and then computes the token masks of the outputs that use it. llguidance never runs in the
engine process.
"""

from llmc_runtime.grammar.client import Grammars
from llmc_runtime.grammar.guide import GrammarGuide, Opening

__all__ = ["GrammarGuide", "Grammars", "Opening"]
