"""Fetch the packages of `sources.py`, clean their text and split it.

Writes WORK/text/train.jsonl and held.jsonl (one {"source", "text"} per line; a
chat record's text holds the template's special tokens) and WORK/text/report.json
with the bytes kept of each source.  Run on Debian 12 after `apt-get update`:

    python prepare.py --work WORK
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import dictionaries
from chat import conversations
from clean import cleaned, document
from extract import READERS
from sources import SOURCES, STORIES, STORY_REPEATS, Source

HELD_OUT_PERCENT = 1
MIN_DOCUMENT = 200
SHORTEST_STORY, SHORTEST_DOCUMENTATION = 16, 80  # characters of a paragraph
# Chats about a word: so many differently asked copies for the words up to each rank.
CHAT_COPIES = ((2500, 16), (12_000, 5))
RARE_CHAT_SHARE = 0.3
MAX_DOCUMENT = 60_000


def fetch(source: Source, work: Path) -> Path:
    """Download and unpack one package unless that is done already."""
    root = work / "root" / source.package
    if root.exists():
        return root
    debs = work / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    if not list(debs.glob(f"{source.package}_*.deb")):
        subprocess.run(["apt-get", "download", source.package], cwd=debs, check=True)
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["dpkg", "-x", next(debs.glob(f"{source.package}_*.deb")), root], check=True)
    return root


def split_of(key: str) -> str:
    """Which side of the split a document or headword belongs to."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "held" if int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT else "train"


def files_of(source: Source, root: Path) -> list[Path]:
    """The regular files of a package that hold its text, in a fixed order."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and source.wants(str(path.relative_to(root)))
    )


def read_file(task: tuple[str, Path, int]) -> list[tuple[str, str]]:
    """Read and clean one documentation file (runs in a worker process)."""
    reader, path, shortest = task
    return cleaned(READERS[reader](path), shortest)


def cleaned_files(source: Source, root: Path, work: Path, pool: ProcessPoolExecutor) -> Iterator[tuple[str, list]]:
    """The cleaned blocks of every file of a source; kept in WORK/cleaned, so a package is read once."""
    kept = work / "cleaned" / f"{source.package}.jsonl"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths = files_of(source, root)
        shortest = SHORTEST_STORY if source in STORIES else SHORTEST_DOCUMENTATION
        tasks = [(source.reader, path, shortest) for path in paths]
        partial = kept.with_suffix(".partial")
        with partial.open("w") as out:
            for path, blocks in zip(paths, pool.map(read_file, tasks, chunksize=16), strict=True):
                if blocks:
                    out.write(json.dumps([str(path.relative_to(root)), blocks]) + "\n")
        partial.rename(kept)
    with kept.open() as file:
        for line in file:
            yield tuple(json.loads(line))


class Corpus:
    """Collects records by split and counts the bytes of every source."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[str, str]]] = {"train": [], "held": []}
        self.pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.sizes: Counter[str] = Counter()
        self.seen: set[bytes] = set()

    def add(self, split: str, source: str, text: str) -> None:
        """Add one record."""
        self.records[split].append((source, text))
        self.sizes[source] += len(text.encode())

    def add_documents(self, source: Source, root: Path, work: Path, pool: ProcessPoolExecutor) -> None:
        """Add the files of a documentation or story source."""
        repeats = STORY_REPEATS if source in STORIES else 1
        for path, blocks in cleaned_files(source, root, work, pool):
            text = document(blocks, self.seen)
            for start in range(0, len(text), MAX_DOCUMENT):
                split = split_of(f"{source.package}/{path}/{start}")
                part = text[start : start + MAX_DOCUMENT]
                for _ in range(repeats if split == "train" else 1):
                    if len(part) >= MIN_DOCUMENT:
                        self.add(split, source.package, part)

    def ranks(self, entries: list[dictionaries.Entry]) -> dict[str, int]:
        """How common each word is: rank 0 occurs in the most stories' paragraphs and dictionary entries."""
        stories = {story.package for story in STORIES}
        texts = [part for source, text in self.records["train"] if source in stories for part in text.split("\n")]
        counts: Counter[str] = Counter()
        for text in texts + [entry.text for entry in entries]:
            counts.update(set(re.findall(r"\b[a-z]{3,}\b", text)))
        return {word: rank for rank, (word, _) in enumerate(counts.most_common())}

    def add_entries(self, source: Source, root: Path, rng: random.Random) -> None:
        """Add the entries of a dictionary; the commoner a word, the more often it is asked about."""
        for path in files_of(source, root):
            entries = list(dictionaries.READERS[source.reader](path))
            ranks = self.ranks(entries)
            for entry in entries:
                split = split_of(entry.key)
                if entry.text:
                    self.add(split, source.package, entry.text)
                rank = ranks.get(entry.key, math.inf)
                count = next((copies for limit, copies in CHAT_COPIES if rank < limit), rng.random() < RARE_CHAT_SHARE)
                count = min(count, 1) if split == "held" or source.reader != "wordnet" else count
                for asked, answer in entry.chats * int(count):
                    self.pairs[split].append((rng.choice(asked), answer))

    def add_chats(self, rng: random.Random) -> None:
        """Turn the collected questions into conversations."""
        for split, pairs in self.pairs.items():
            for text in conversations(pairs, rng):
                self.add(split, "chat", text)


def build(work: Path) -> Corpus:
    """Read all sources."""
    rng = random.Random(0)
    corpus = Corpus()
    with ProcessPoolExecutor(2) as pool:
        for source in SOURCES:
            root = fetch(source, work)
            if source.reader in READERS:
                corpus.add_documents(source, root, work, pool)
            else:
                corpus.add_entries(source, root, rng)
            print(f"{source.package:28} {corpus.sizes[source.package] / 1e6:8.2f} MB", flush=True)
    corpus.add_chats(rng)
    return corpus


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    corpus = build(work)
    out = work / "text"
    out.mkdir(parents=True, exist_ok=True)
    for split, records in corpus.records.items():
        random.Random(1).shuffle(records)
        with (out / f"{split}.jsonl").open("w") as file:
            for source, text in records:
                file.write(json.dumps({"source": source, "text": text}) + "\n")
        print(split, len(records), "records", sum(len(t) for _, t in records) / 1e6, "MB")
    (out / "report.json").write_text(json.dumps(dict(corpus.sizes), indent=1))


if __name__ == "__main__":
    main()
