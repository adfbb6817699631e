"""An engine process whose model repeats a script from its prompt: `parrot_core.py PACE PARENT FOLDER HEARTBEAT`.

The script consists of the tokens between the prompt's last <|user|> and the next <|assistant|>, followed by the end
token. If a mask excludes a token, the simulated device's own choice is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.engine_process import main
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.session import Session
from llmc_runtime.grammar import Grammars
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.text.tokenizer import Tokenizer
from tokenizers import AddedToken

from tests.runtime.fake_executor import FakeExecutor

sys.path.append(str(Path(__file__).parents[1]))
import textkit

MARKS = (
    "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]",
    "[/THINK]", "<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and a few merges. Every family's marks are special tokens, except the added
    <tool_call>.
    """
    backend = textkit.byte_level(bos=True)
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return Tokenizer(backend, NAMES, {})


class Parrot(FakeExecutor):
    """The simulated device, generating the script."""

    def __init__(self, tok: Tokenizer, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._first, self._last, self._end = (tok.backend.token_to_id(t) for t in ("<|user|>", "<|assistant|>", "</s>"))

    def _work(self, item: Any, scores: Any) -> int | None:
        row = self._row(item.row)
        count = len(row.tokens)
        mask = row.masks[count % len(row.masks)]
        token = super()._work(item, scores)
        if token is None:
            return None
        wanted = self._wanted(row.tokens[: row.num_prompt], count - row.num_prompt)
        if mask and not mask[wanted >> 3] >> (wanted & 7) & 1:
            wanted = token
        if len(row.tokens) > count:
            row.tokens[-1] = wanted
        return wanted

    def _wanted(self, prompt: list[int], index: int) -> int:
        if self._first not in prompt:
            return self._end
        start = len(prompt) - prompt[::-1].index(self._first)
        script = prompt[start : prompt.index(self._last, start)]
        return script[index] if index < len(script) else self._end


def opener() -> Callable[[Open, Callable[[str], None]], Session]:
    """Return the engine process's function for opening an artifact."""
    tok = tokenizer()
    vocab, end = tok.vocab_size, tok.eos_token_id or 0
    config = SchedulerConfig(2048, 16, 8192, 16, 512, vocab, eos_token_ids=(end,))

    def open_parrot(wanted: Open, say: Callable[[str], None]) -> Session:
        device = Parrot(tok, 16, 2048, 16, vocab, 8192, 512)
        engine = Engine(Scheduler(config, lambda: 11), device)
        return Session(engine, "a parrot", lambda: Grammars(tok, vocab, [end]), lambda: None)

    return open_parrot


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], opener()))
