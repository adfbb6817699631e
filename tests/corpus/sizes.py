"""The families of the corpus: how each is made in a folder, and how much of it a sample is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

from corpus import artifacts, headers, models, texts
from corpus.judge import Case

Family = Callable[[Path, Random, bool], Iterable[Case]]


def of_artifacts(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    toy = artifacts.toy(folder)
    yield from artifacts.flips(toy, rng, 5000 if full else 150)


def of_manifests(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from artifacts.manifest_flips(artifacts.toy(folder), rng, 1 if full else 83)


def of_truncations(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from artifacts.truncations(artifacts.toy(folder), rng, 1 if full else 499)


def of_nonsense(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from artifacts.nonsense(artifacts.toy(folder), rng, 6000 if full else 150)


def of_folders(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from artifacts.folders(artifacts.toy(folder))


def of_headers(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    toy = artifacts.toy(folder)
    yield from headers.headers(toy, folder, rng, 1500 if full else 20)
    if full:
        yield from headers.large(toy, folder)


def of_indexes(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from headers.indexes(rng, 300 if full else 20)


def of_tokenizers(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from texts.tokenizers(folder, rng, 3000 if full else 60)


def of_templates(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from texts.templates(folder, rng, 2000 if full else 60)


def of_links(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from models.links(rng)


def of_configs(folder: Path, rng: Random, full: bool) -> Iterable[Case]:
    yield from models.configs(folder, rng, 150 if full else 4)


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
