"""Train the byte-level BPE tokenizer and encode the text to token files.

    python tokenizer.py --work WORK --out MODEL_DIR [--vocab 4096]

Writes tokenizer.json and tokenizer_config.json to MODEL_DIR, and WORK/tokens/
{train,held}.npy (uint16 streams of <|bos|> text <|eos|> documents) with
held.json, the documents' sources, byte counts and token offsets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from chat import BOS, EOS, PAD, SPECIAL_TOKENS, TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT = 1024
ENCODE_BATCH = 2000


def records(path: Path) -> Iterator[tuple[str, str]]:
    """The (source, text) records of a JSON lines file."""
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            yield record["source"], record["text"]


def train(text: Path, vocab: int) -> Tokenizer:
    """Train a GPT-2 style byte-level BPE; every byte is in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for source, text in records(text) if source != "chat")
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write the two tokenizer files in the Hugging Face layout."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, source: Path, out: Path) -> list[tuple[str, int, int]]:
    """Encode a record file; return every document's source, bytes and first token."""
    eos = tokenizer.token_to_id(EOS)
    pieces: list[np.ndarray] = []
    table: list[tuple[str, int, int]] = []
    batch: list[tuple[str, str]] = []
    position = 0

    def flush() -> None:
        nonlocal position
        encoded = tokenizer.encode_batch_fast([text for _, text in batch])
        for (name, text), item in zip(batch, encoded, strict=True):
            ids = item.ids if item.ids[-1] == eos else [*item.ids, eos]
            table.append((name, len(text.encode()), position))
            pieces.append(np.array(ids, dtype=np.uint16))
            position += len(ids)
        batch.clear()

    for record in records(source):
        batch.append(record)
        if len(batch) == ENCODE_BATCH:
            flush()
    flush()
    np.save(out, np.concatenate(pieces))
    return table


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    tokenizer = train(args.work / "text" / "train.jsonl", args.vocab)
    save(tokenizer, args.out)
    tokens = args.work / "tokens"
    tokens.mkdir(exist_ok=True)
    for split in ("held", "train"):
        table = encode(tokenizer, args.work / "text" / f"{split}.jsonl", tokens / f"{split}.npy")
        size = sum(bytes_ for _, bytes_, _ in table)
        count = len(np.load(tokens / f"{split}.npy", mmap_mode="r"))
        print(f"{split}: {len(table)} documents, {size} bytes, {count} tokens")
        if split == "held":
            (tokens / "held.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main()
