"""Collect the questions for the second training stage: definitions of common words.

    python common_words.py --work WORK

Writes WORK/text/common.jsonl: {"asked": [questions], "answer": text} for every
WordNet headword that is frequent in the training text and not held out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from dictionaries import read_wordnet
from prepare import COMMON_WORDS, split_of

TECHNICAL = ("linux-doc-6.1", "openjdk-17-doc", "chat", "qtbase5-doc-html", "dict-gcide")


def frequent(text: Path) -> set[str]:
    """The words that occur in the most documents of a sample of the training text."""
    counts: Counter[str] = Counter()
    with text.open() as file:
        for number, line in enumerate(file):
            record = json.loads(line)
            if number % 3 == 0 and record["source"] not in TECHNICAL:
                counts.update(set(re.findall(r"\b[a-z]{3,}\b", record["text"])))
    return {word for word, _ in counts.most_common(COMMON_WORDS)}


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    words = frequent(work / "text" / "train.jsonl")
    count = 0
    with (work / "text" / "common.jsonl").open("w") as out:
        path = work / "root" / "dict-wn" / "usr" / "share" / "dictd" / "wn.dict.dz"
        for entry in read_wordnet(path):
            if entry.key in words and split_of(entry.key) == "train":
                for asked, answer in entry.chats:
                    out.write(json.dumps({"asked": asked, "answer": answer}) + "\n")
                    count += 1
    print(f"{count} questions about common words")


if __name__ == "__main__":
    main()
