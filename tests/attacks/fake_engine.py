"""An engine process over the simulated device for attacks: `fake_engine.py SETTINGS PARENT FOLDER HEARTBEAT`.

SETTINGS is JSON, see Settings. Limits come from the front, as a real engine's do; a token of KV takes 1 KiB.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_process import main
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.session import Session
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.kv.prefix import PrefixCache
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.fake_executor import FakeExecutor

VOCAB, PAGE = 428, 4
TOKEN_BYTES = 1024
SEED = 11  # of requests that bring none


@dataclass(frozen=True)
class Settings:
    """`pace`: seconds that a step takes at least; `per_token`: and each of its tokens; `log`: a file that gets a line
    for each launched step: the time, then the first three tokens of every request in it. `wrong`: one token in so many
    is another than the device's (0: none). `weak`: bytes of a prefix digest that count (0: all)."""

    pace: float = 0.0
    per_token: float = 0.0
    depth: int = 2
    log: str = ""
    wrong: int = 0
    weak: int = 0


class Paced:
    """The simulated device at a pace, its steps on record."""

    def __init__(self, inner: FakeExecutor, settings: Settings) -> None:
        self.inner, self.settings, self.depth = inner, settings, inner.depth
        self.guide, self.settle = inner.guide, inner.settle
        self._log = open(settings.log, "a", buffering=1) if settings.log else None
        self._tags: dict[int, str] = {}
        self._drawn = itertools.count(1)

    def launch(self, step: Any) -> Any:
        """Launch it, and take the time that it should."""
        for init in step.inits:
            self._tags[init.row] = ".".join(map(str, init.tokens[:3]))
        if self._log is not None:
            tags = " ".join(self._tags[item.row] for item in step.work)
            self._log.write(f"{time.monotonic():.6f} {tags}\n")
        seconds = self.settings.pace + self.settings.per_token * sum(item.num_tokens for item in step.work)
        if seconds:
            time.sleep(seconds)
        return self.inner.launch(step)

    def wait(self, ticket: Any) -> Any:
        """Return the step's output, with wrong tokens if the settings request them."""
        output = self.inner.wait(ticket)
        if self.settings.wrong:
            for i, token in enumerate(output.tokens):
                if token is not None and next(self._drawn) % self.settings.wrong == 0:
                    output.tokens[i] = (token + 1) % VOCAB
        return output


def weaken(size: int) -> None:
    """Let prefixes collide: only `size` bytes of a digest count."""
    extend = PrefixCache.extend

    def short(self: Any, chain: list[bytes], tokens: Any, upto: int) -> None:
        begun = len(chain)
        extend(self, chain, tokens, upto)
        chain[begun:] = [one[:size] for one in chain[begun:]]

    PrefixCache.extend = short  # type: ignore[method-assign]


def grammars() -> Any:
    """Those of the tokenizer of the tests."""
    from llmc_runtime.grammar import Grammars

    sys.path.append(str(Path(__file__).parents[1]))
    import textkit
    from llmc_runtime.text.tokenizer import Tokenizer

    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Grammars(Tokenizer(textkit.byte_level(bos=True), names, {}), VOCAB, [VOCAB - 1])


def config_of(wanted: Open) -> SchedulerConfig:
    """The limits that the front asks for, or small ones."""
    options = EngineOptions.of_message(wanted.path, wanted.options)
    length = options.max_model_len or 256
    rows = options.max_num_seqs or 16
    tokens = options.max_num_batched_tokens or 64
    pages = (options.kv_cache_memory_bytes or 2048 * TOKEN_BYTES) // (PAGE * TOKEN_BYTES)
    more: dict[str, Any] = {
        "policy": options.scheduling_policy,
        "prefix_caching": options.enable_prefix_caching is not False,
    }
    return SchedulerConfig(pages, PAGE, length, rows, tokens, VOCAB, eos_token_ids=(VOCAB - 1,), **more)


def opener(settings: Settings) -> Callable[[Open, Callable[[str], None]], Session]:
    """Return the function that opens the engine of the process."""

    def open_fake(wanted: Open, say: Callable[[str], None]) -> Session:
        config = config_of(wanted)
        rng = random.Random(3) if settings.depth > 1 else None
        fake = FakeExecutor(
            config.max_num_seqs, config.num_pages, PAGE, VOCAB, config.max_model_len, config.max_num_batched_tokens,
            settings.depth, rng,
        )  # fmt: skip
        engine = Engine(Scheduler(config, lambda: SEED), Paced(fake, settings))
        return Session(engine, "the simulated device", grammars, lambda: None)

    if settings.weak:
        weaken(settings.weak)
    return open_fake


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], opener(Settings(**json.loads(sys.argv[1])))))
