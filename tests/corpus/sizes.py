"""The families of the corpus: how each is made in a folder, and how much of it a sample is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

from corpus import artifacts, headers, models, texts
from corpus.judge import Case

Family = Callable[[Path, Random, bool], Iterable[Case]]


def _some(cases: Iterable[Case], rng: Random, full: bool, count: int) -> Iterable[Case]:
    """All of them, or `count` of them."""
    every = list(cases)
    return every if full or len(every) <= count else rng.sample(every, count)


def of_artifacts(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    """10,000 flips: every one is run, and looked into by one command more. Some are of a model that we compiled."""
    yield from artifacts.flips(artifacts.toy(folder), rng, 9500 if full else 100)
    if full:
        yield from artifacts.flips(artifacts.compiled(folder), rng, 500)


def of_manifests(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    """Every byte of the manifest."""
    return artifacts.manifest_flips(artifacts.toy(folder), rng, 1 if full else 101)


def of_truncations(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    """Every length of every file."""
    return artifacts.truncations(artifacts.toy(folder), rng, 1 if full else 499)


def of_nonsense(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return artifacts.nonsense(artifacts.toy(folder), rng, 6000 if full else 100)


def of_folders(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(artifacts.folders(artifacts.toy(folder)), rng, full, 60)


def of_headers(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    toy = artifacts.toy(folder)
    yield from _some(headers.headers(toy, folder, rng, 1500 if full else 50), rng, full, 100)
    if full:
        yield from headers.large(toy, folder)


def of_indexes(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(headers.indexes(rng, 300 if full else 20), rng, full, 60)


def of_tokenizers(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(texts.tokenizers(folder, rng, 3000 if full else 60), rng, full, 70)


def of_templates(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(texts.templates(folder, rng, 2000 if full else 60), rng, full, 40)


def of_links(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(models.links(rng), rng, full, 60)


def of_configs(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    return _some(models.configs(folder, rng, 120 if full else 10), rng, full, 5)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "flips": of_artifacts,
        "manifest": of_manifests,
        "truncations": of_truncations,
        "nonsense": of_nonsense,
        "folders": of_folders,
        "headers": of_headers,
        "indexes": of_indexes,
        "tokenizers": of_tokenizers,
        "templates": of_templates,
        "links": of_links,
        "configs": of_configs,  # torch comes with it, so it is the last
    }
)
