"""Score a checkpoint on the held-out documents and print unedited samples.

    python evaluate.py --model MODEL_DIR --data WORK/tokens --out report.md

Bits per byte: the negative log2 likelihood of every token after <|bos|>, the
closing <|eos|> included, over the bytes of text (special tokens not counted).
Documents longer than the context are scored in windows that overlap by half.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT_PROMPTS = [
    "Once upon a time",
    "The compiler",
    "It was a dark and stormy night",
    "A computer program is",
    "The old wizard looked at the king and said",
    "A river is",
    "She walked into the room and",
    "Before you install the package,",
    "The history of computing",
    "A good friend",
    "The captain of the ship",
    "In the beginning",
    "Memory is",
    "My dear sister,",
]
CHAT_PROMPTS = [
    "What is a compiler?",
    'What does "admire" mean?',
    "What is a river?",
    "Hello!",
    "Define courage.",
    "What does king mean?",
]
SPECIAL = 7
TEMPERATURE, TOP_P, MAX_NEW = 0.7, 0.9, 120
BATCH = 32


class Scorer:
    """The likelihood of held-out documents under one model."""

    def __init__(self, path: Path) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.to(self.device).eval()
        self.context = self.model.config.max_position_embeddings
        names = self.tokenizer.convert_ids_to_tokens(list(range(SPECIAL)))
        self.special_bytes = [len(name) for name in names]

    def windows(self, ids: np.ndarray) -> list[tuple[np.ndarray, int]]:
        """(token window, first position whose prediction counts) pairs."""
        out, half, start = [(ids[: self.context], 1)], self.context // 2, self.context // 2
        while start + half < len(ids):
            out.append((ids[start : start + self.context], half))
            start += half
        return out

    @torch.no_grad()
    def nats(self, batch: list[tuple[np.ndarray, int]]) -> list[float]:
        """The negative log likelihood of every window of a batch."""
        width = max(len(ids) for ids, _ in batch)
        rows = torch.full((len(batch), width), 2, dtype=torch.long)
        labels = torch.full((len(batch), width), -100, dtype=torch.long)
        for row, (ids, first) in enumerate(batch):
            rows[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            labels[row, first : len(ids)] = rows[row, first : len(ids)]
        logits = self.model(rows.to(self.device)).logits[:, :-1].float()
        loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:].to(self.device), reduction="none")
        return loss.sum(1).tolist()

    def score(self, data: Path) -> dict[str, tuple[float, int]]:
        """Nats and bytes of every source."""
        tokens = load_tokens(data)
        table = json.loads((data / "held.json").read_text())
        ends = [entry[2] for entry in table[1:]] + [len(tokens)]
        size: dict[str, int] = defaultdict(int)
        nats: dict[str, float] = defaultdict(float)
        work = []
        for (source, length, start), end in zip(table, ends, strict=True):
            ids = tokens[start:end]
            if source == "chat":
                length -= sum(self.special_bytes[i] for i in ids[1:] if i < SPECIAL)
            size[source] += length
            work += [(source, window) for window in self.windows(ids)]
        work.sort(key=lambda item: len(item[1][0]))
        for start in range(0, len(work), BATCH):
            part = work[start : start + BATCH]
            for (source, _), value in zip(part, self.nats([w for _, w in part]), strict=True):
                nats[source] += value
        return {source: (nats[source], size[source]) for source in size}

    @torch.no_grad()
    def sample(self, prompt: str, chat: bool, seed: int) -> tuple[str, bool]:
        """One continuation, and whether it ended with <|eos|>."""
        if chat:
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids = self.tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt").input_ids
        torch.manual_seed(seed)
        out = self.model.generate(
            ids.to(self.device), do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0, max_new_tokens=MAX_NEW
        )[0]
        ended = int(out[-1]) == self.tokenizer.eos_token_id
        return self.tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True), ended


def load_tokens(data: Path) -> np.ndarray:
    """The held-out token stream, compressed or not."""
    path = data / "held.npy"
    if path.exists():
        return np.load(path)
    return np.load(io.BytesIO(lzma.decompress(path.with_suffix(".npy.xz").read_bytes())))


def bits(nats: float, size: int) -> float:
    """Bits per byte."""
    return nats / math.log(2) / size


def score_report(scores: dict[str, tuple[float, int]]) -> list[str]:
    """The table of held-out scores, one line a source and the totals."""
    groups = {"all": list(scores), "text": [s for s in scores if s != "chat"]}
    lines = ["| held-out source | bytes | bits per byte |", "| --- | --- | --- |"]
    for name, members in groups.items():
        nats = sum(scores[member][0] for member in members)
        size = sum(scores[member][1] for member in members)
        lines.append(f"| **{name}** | {size} | **{bits(nats, size):.3f}** |")
    for source, (nats, size) in sorted(scores.items(), key=lambda item: -item[1][1]):
        lines.append(f"| {source} | {size} | {bits(nats, size):.3f} |")
    return lines


def sample_report(scorer: Scorer) -> list[str]:
    """Twenty continuations, exactly as generated."""
    lines = []
    prompts = [(p, False) for p in TEXT_PROMPTS] + [(p, True) for p in CHAT_PROMPTS]
    for seed, (prompt, chat) in enumerate(prompts, start=1):
        text, ended = scorer.sample(prompt, chat, seed)
        kind = "chat" if chat else "text"
        end = "ended with EOS" if ended else "cut at the length limit"
        body = "\n".join(f"> {line}".rstrip() for line in f"**{prompt}**{' ' if chat else ''}{text}".split("\n"))
        lines += [f"{seed}. {kind}, seed {seed}, {end}:", "", body, ""]
    return lines


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    scorer, started = Scorer(args.model), time.monotonic()
    lines = [f"Sampling: temperature {TEMPERATURE}, top_p {TOP_P}, at most {MAX_NEW} tokens.", ""]
    lines += sample_report(scorer)
    if args.data:
        table = score_report(scorer.score(args.data))
        print("\n".join(table[:4]))
        lines = [*table, "", *lines]
    args.out.write_text("\n".join(lines) + "\n")
    print(f"evaluated in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
