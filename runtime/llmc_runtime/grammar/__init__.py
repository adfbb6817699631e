"""Structured outputs: llguidance in processes of its own, bounded in CPU time, memory and wall time.

`Grammars` is the engine's side. One host process builds the vocabulary and forks a worker for each grammar of each
tenant; a worker compiles its grammar and then follows the outputs that use it. llguidance never runs in the engine.
"""

from llmc_runtime.grammar.client import Grammars
from llmc_runtime.grammar.guide import GrammarGuide, Opening

__all__ = ["GrammarGuide", "Grammars", "Opening"]
