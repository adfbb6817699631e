"""The requests of a load: a plan for the client processes, and bodies with random token ids, random words or texts of a
file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmc_runtime.bench.workload import Mix
from llmc_runtime.format.errors import LlmcError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_LOWEST = 16
_SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi")


@dataclass(frozen=True)
class Item:
    """An entry of a data set: a text or a conversation, and the number of tokens to generate."""

    prompt: str | list[dict[str, Any]]
    output_len: int | None = None


@dataclass(frozen=True)
class Recipe:
    """The common properties of all requests.

    Random ids are below 90 % of `vocab_size`, where special ids are rare. `items` is a data set that replaces random
    prompts. `extra` contains additional fields of the body, which override others.
    """

    endpoint: str
    model: str
    vocab_size: int
    seed: int = 0
    ignore_eos: bool = False
    items: Sequence[Item] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def bodies(self, mix: Mix, process: int, processes: int) -> Iterator[tuple[bytes, int]]:
        """Yield this process's requests of `mix` without end: (JSON body, number of prompt tokens).

        The number is 0 if only the server can count them.
        """
        participants = mix.participants(processes)
        for i, (input_len, output_len) in enumerate(mix.sizes(str(self.seed))):
            if i % participants != process:
                continue
            prompt: Any
            if self.items:
                item = self.items[i % len(self.items)]
                prompt, output_len, count = item.prompt, item.output_len or output_len, 0
            else:
                prompt, count = self._random(mix, i, input_len)
            yield self._body(prompt, output_len), count

    def _body(self, prompt: Any, output_len: int) -> bytes:
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint.endswith("/chat/completions"):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body |= {"messages": messages, "max_completion_tokens": output_len}
        else:
            body |= {"prompt": prompt, "max_tokens": output_len}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | dict(self.extra), separators=(",", ":")).encode()

    def _random(self, mix: Mix, i: int, input_len: int) -> tuple[Any, int]:
        """Return `input_len` random ids (completions) or words (chats); equal for equal seed, mix and number."""
        name = int.from_bytes(mix.name.encode()[:8], "little")
        suffix = np.random.default_rng((self.seed, name, 1, i)).integers(0, 1 << 40, input_len)
        shared = np.random.default_rng((self.seed, name, 2, i % mix.num_prefixes)).integers(0, 1 << 40, mix.prefix_len)
        drawn = np.concatenate([shared, suffix])
        if self.endpoint.endswith("/chat/completions"):
            return " ".join(_word(int(value)) for value in drawn), 0
        ids = usual_ids(self.vocab_size)
        return (ids.start + drawn % len(ids)).tolist(), len(drawn)


def usual_ids(vocab_size: int) -> range:
    """Return token ids that are not special tokens in most vocabularies: above the lowest, below 90 % of the size."""
    high = max(vocab_size * 9 // 10, 2)
    return range(min(_LOWEST, high - 1), high)


def _word(value: int) -> str:
    return "".join(_SYLLABLES[value >> shift & 7] for shift in (0, 3, 6))


def read_items(path: Path, kind: str, endpoint: str) -> list[Item]:
    """Read a data set. Raises LlmcError E670 if it cannot be read, or contains nothing that can be sent.

    With `kind` "custom", the file consists of JSON lines with "prompt" (a text) or "messages" (a list), and optionally
    "output_len" or "max_tokens". With "sharegpt", it is a JSON list, or JSON lines, of {"conversations": [{"from",
    "value"}, ...]}: the first text is the prompt, and the length of the second one, at four characters per token, is
    the output length.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
        items = [item for row in rows if (item := (_custom if kind == "custom" else _sharegpt)(row)) is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        remedy = "use JSON lines with a prompt or messages each (custom), or ShareGPT's JSON (sharegpt)"
        raise LlmcError("E670", f"{path} is not a data set of kind {kind}: {e!r:.200}", remedy) from e
    if endpoint == COMPLETIONS:
        items = [item for item in items if isinstance(item.prompt, str)]
    if not items:
        raise LlmcError("E670", f"{path} has no entries for {endpoint}", "use another --endpoint or another file")
    return items


def _custom(row: Mapping[str, Any]) -> Item:
    return Item(
        row["messages"] if "messages" in row else str(row["prompt"]), row.get("output_len", row.get("max_tokens"))
    )


def _sharegpt(row: Mapping[str, Any]) -> Item | None:
    turns = [str(turn["value"]) for turn in itertools.islice(row["conversations"], 2)]
    return Item(turns[0], max(len(turns[1]) // 4, 1)) if len(turns) == 2 and turns[0] else None
