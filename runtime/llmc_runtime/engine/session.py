"""An engine as its process serves it, and how it is opened from the first message."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmc_runtime.artifact import has_tokenizer
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.open_model import open_model
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.grammar import Grammars

if TYPE_CHECKING:
    from llmc_runtime.exec.rank_group import RankGroup


@dataclass(frozen=True)
class Session:
    """An open engine.

    summary:   one log line about it
    threads:   compute threads of all ranks on the CPU; 0 on other devices
    grammars:  opens the grammars of its vocabulary; None without a tokenizer
    close:     frees everything
    stages:    duration of each part of opening, in seconds
    group:     the other ranks of the engine, if it has several
    """

    engine: Engine
    summary: str
    grammars: Callable[[], Grammars | None]
    close: Callable[[], None]
    stages: Mapping[str, float] = field(default_factory=dict)
    threads: int = 0
    group: RankGroup | None = None


Opener = Callable[[Open, Callable[[str], None]], Session]


def open_session(opening: Open, say: Callable[[str], None]) -> Session:
    """Open the artifact as LLM does; `say` is called with log lines. Raises LlmcError E1xx, E2xx."""
    options = EngineOptions.of_message(opening.path, opening.options)
    say(options.opening_line(options.model))
    began = time.monotonic()
    with open_model(Path(options.model), options, opening.digest, opening.engine) as artifact:
        stages = {"artifact": time.monotonic() - began}
        from llmc_runtime.engine.loader import open_engine  # with numpy: the GPU is initialized meanwhile

        opened = open_engine(artifact, options, opening.eos or (), opening.engine)

    def grammars() -> Grammars | None:
        if not has_tokenizer(artifact.manifest):
            return None
        config = opened.engine.scheduler.config
        return Grammars(artifact.tokenizer_dir, config.vocab_size, config.eos_token_ids)

    ranks = artifact.manifest.ranks
    threads = ranks * options.rank_threads(ranks) if artifact.manifest.target.name.startswith("cpu:") else 0
    stages |= opened.stages
    return Session(
        opened.engine,
        opened.summary,
        grammars=grammars,
        close=opened.close,
        stages=stages,
        threads=threads,
        group=opened.group,
    )
