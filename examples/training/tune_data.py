"""Encode the text of the second training stage.

    python tune_data.py --work WORK --tokenizer MODEL_DIR --out WORK/tune

The stream holds every question of common.jsonl ``REPEATS`` times, each time
asked in another way and in another conversation, between a random third of the
records of train.jsonl.  The held-out stream is copied unchanged.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import numpy as np
from chat import EOS, conversations
from tokenizers import Tokenizer

REPEATS = 6
GENERAL_SHARE = 0.33


def questions(path: Path, rng: random.Random) -> list[str]:
    """Conversations about common words."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(rng.choice(row["asked"]), row["answer"]) for row in rows for _ in range(REPEATS)]
    return conversations(pairs, rng)


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(2)
    text = args.work / "text"
    with (text / "train.jsonl").open() as file:
        texts = [json.loads(line)["text"] for line in file if rng.random() < GENERAL_SHARE]
    texts += questions(text / "common.jsonl", rng)
    rng.shuffle(texts)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    pieces = []
    for item in tokenizer.encode_batch_fast(texts):
        ids = item.ids if item.ids[-1] == eos else [*item.ids, eos]
        pieces.append(np.array(ids, dtype=np.uint16))
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "train.npy", np.concatenate(pieces))
    shutil.copy(args.work / "tokens" / "held.npy", args.out / "held.npy")
    print(f"{len(pieces)} documents, {sum(map(len, pieces))} tokens")


if __name__ == "__main__":
    main()
