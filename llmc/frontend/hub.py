"""Downloads a model from the Hugging Face hub into a local folder, pinned to one commit.

Only files on an allow-list are fetched, never code: configurations, tokenizer, chat templates, safetensors and their
index, from the top level of the repository. Requests and the cache layout are huggingface_hub's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.names import TEMPLATE_DIR
from llmc_runtime.option_type import option

from llmc.diagnostics import Diagnostic
from llmc.frontend import unsupported
from llmc.frontend.model_folder import (
    POOLING_FILES,
    TOKENIZER_FILES,
    check_weights,
    open_source,
    read_config,
    read_json,
)
from llmc.frontend.quantization_files import FILES
from llmc.frontend.weight_shards import numbered_shards

ID = re.compile(r"(?!.*\.\.)(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_SECONDS = 20.0  # timeout of a request in seconds

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)
Check = Callable[[Mapping[str, Any]], object]  # checks a config.json; raises if the model is not supported


@dataclass(frozen=True)
class Hub:
    """The hub that resolves model ids: its address, the download folder, and whether the network may be used."""

    endpoint: str | None = option(
        None, "address of the hub for model ids (the public one)", flags=("--hub-endpoint",), metavar="URL"
    )
    folder: Path | None = option(
        None, "download folder of models (huggingface_hub's cache)", flags=("--download-dir",), read=Path, metavar="DIR"
    )
    offline: bool = option(False, "send no request: models by id come from the download folder only", read=None)


PUBLIC = Hub()


@dataclass(frozen=True)
class Located:
    """A local folder and its origin: the hub name and the commit (40 hex digits), or two empty strings."""

    folder: Path
    name: str = ""
    commit: str = ""


def any_model(config: Mapping[str, Any]) -> None:
    """Accept every config.json."""


def locate(
    model: str | Path, hub: Hub, weights: bool = True, progress: Progress | None = None, check: Check = any_model
) -> Located:
    """Return the folder of a model: a local path, or a hub id `owner/name[@revision]` (or `name@revision`) to download.

    An existing path takes precedence over a hub id. weights: whether weights are needed. `check` is called with
    config.json before weights are downloaded, and may raise. Raises Diagnostic E330 (no such repository), E331 (gated
    or private), E332 (no connection, or not downloaded and offline), E333 (no such revision), E334 (unusable answer),
    and E301-E304, E307, E320 if the folder is not a model that can be compiled.
    """
    m = ID.fullmatch(str(model)) if isinstance(model, str) else None
    if m is None or Path(model).exists() or not ("/" in m["name"] or m["revision"]):
        at = Located(Path(model))
    else:
        at = _Fetch(m["name"], m["revision"] or "main", hub, progress, check).run(weights)
    check(open_source(at.folder).config)
    if weights:
        check_weights(at.folder)
    return at


def files_to_download(names: Collection[str], shards: Collection[str] | None) -> list[str]:
    """Return the names of the files to download. `shards`: the weight files, or None to skip weights."""
    weights = {*shards, unsupported.INDEX} if shards is not None else set()
    top_level = {*TOKENIZER_FILES, *POOLING_FILES, *FILES, *weights}
    return [n for n in sorted(names) if n in top_level or _is_inner(n)]


def _is_inner(name: str) -> bool:
    """Whether a file in a subfolder is wanted: an additional chat template, or the config of a pooling module."""
    folder, _, rest = name.partition("/")
    if folder == TEMPLATE_DIR:
        return "/" not in rest and rest.endswith(".jinja")
    return folder.endswith("_Pooling") and rest == "config.json"


class _Fetch:
    """The download of one model."""

    def __init__(self, name: str, revision: str, hub: Hub, progress: Progress | None, check: Check):
        self.name, self.revision, self.hub = name, revision, hub
        self.progress = progress or (lambda done, of: None)
        self.check = check
        self.where = f"{name}@{revision}"

    def run(self, weights: bool) -> Located:
        """Check config.json first, then download the wanted files, reporting progress in bytes."""
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        commit, sizes = self.downloaded() if self.hub.offline else self.online()
        if "config.json" not in sizes:
            raise unsupported.refuse_without_config(sizes, self.where)
        folder = self.file("config.json", commit).parent
        for name in sorted(sizes.keys() & FILES.keys()):
            self.file(name, commit)
        config = read_config(folder)
        unsupported.check_config(config, self.where)
        self.check(config)
        files = files_to_download(sizes, self.shards(sizes, commit) if weights else None)
        total, done = sum(sizes[n] for n in files), 0
        for n in files:
            self.file(n, commit)
            done += sizes[n]
            self.progress(done, total)
        if not self.hub.offline and self.revision != commit:
            _note(folder.parent.parent / "refs" / self.revision, commit)
        return Located(folder, self.name, commit)

    def shards(self, sizes: Collection[str], commit: str) -> list[str]:
        """Return the names of the weight files: a single file that the index lacks, those in the index, or all numbered
        shards.
        """
        if unsupported.INDEX not in sizes:
            if unsupported.SINGLE in sizes:
                return [unsupported.SINGLE]
            if numbered := numbered_shards(sizes):
                return numbered
            raise unsupported.refuse_weights(sizes, self.where)
        entries = read_json(self.file(unsupported.INDEX, commit)).get("weight_map")
        named = set(entries.values()) if isinstance(entries, dict) else set()
        if unsupported.SINGLE in sizes and unsupported.SINGLE not in named:
            return [unsupported.SINGLE]
        lacking = sorted(str(n) for n in named if n not in sizes or not str(n).endswith(".safetensors"))
        if not named or lacking:
            raise self.unusable(f"{unsupported.INDEX} names {lacking[0] if lacking else 'no file'}, which is not there")
        return sorted(named)

    def online(self) -> tuple[str, dict[str, int]]:
        """Ask the hub for the commit of the revision, and for its relevant files with their sizes."""
        from huggingface_hub import HfApi

        info = self.guarded(
            lambda: HfApi(endpoint=self.hub.endpoint).model_info(
                self.name, revision=self.revision, timeout=TIMEOUT_SECONDS, files_metadata=True
            )
        )
        if not COMMIT.fullmatch(str(info.sha)):
            raise self.unusable(f"its commit is {info.sha!r}, not 40 digits")
        sizes = {s.rfilename: int(s.size or 0) for s in info.siblings or ()}
        files = {name: size for name, size in sizes.items() if "/" not in name or _is_inner(name)}
        return str(info.sha), files

    def downloaded(self) -> tuple[str, dict[str, int]]:
        """Commit and files of an earlier download."""
        folder = self.file("config.json", self.revision).parent
        paths = [*folder.iterdir(), *folder.glob(f"{TEMPLATE_DIR}/*"), *folder.glob("*_Pooling/config.json")]
        return folder.name, {p.relative_to(folder).as_posix(): p.stat().st_size for p in paths}

    def file(self, name: str, revision: str) -> Path:
        """Download one file, or find it in the cache, and return its path."""
        from huggingface_hub import hf_hub_download

        def download() -> str:
            return str(
                hf_hub_download(
                    self.name, name, revision=revision, cache_dir=self.hub.folder, endpoint=self.hub.endpoint,
                    local_files_only=self.hub.offline, etag_timeout=TIMEOUT_SECONDS,
                )
            )  # fmt: skip

        return Path(self.guarded(download))

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Return call(), translating each of the hub client's errors into a Diagnostic."""
        from huggingface_hub import errors

        try:
            return call()
        except errors.GatedRepoError:
            raise Diagnostic(
                "E331",
                f"{self.name} is gated: access requires accepting its publisher's terms",
                "accept the terms on the model's page, then run `hf auth login` with a token that has access",
            ) from None
        except errors.RepositoryNotFoundError:
            raise Diagnostic(
                "E330",
                f"{self.at} has no public repository {self.name}; a private one needs a token",
                "check the name (owner/name), or run `hf auth login`; the path of a local folder must exist",
            ) from None
        except errors.RevisionNotFoundError:
            raise Diagnostic(
                "E333", f"{self.name} has no revision {self.revision!r}", "give an existing branch, tag or commit"
            ) from None
        except errors.LocalEntryNotFoundError as e:
            raise self.unreachable(e) from None
        except (errors.HfHubHTTPError, errors.HFValidationError, errors.EntryNotFoundError) as e:
            raise self.unusable(_line(e)) from None
        except (errors.HTTPError, ConnectionError, TimeoutError) as e:
            raise self.unreachable(e) from None

    @property
    def at(self) -> str:
        return self.hub.endpoint or "the hub"

    def unreachable(self, e: Exception) -> Diagnostic:
        """Return the error for a hub that does not respond."""
        if self.hub.offline:
            return Diagnostic(
                "E332",
                f"{self.where} is not in {self.hub.folder or 'the download folder'}, and --offline sends no request",
                "download it once without --offline, or give a local folder",
            )
        return Diagnostic(
            "E332",
            f"{self.at} does not respond for {self.where}: {_line(e)}",
            "check the network, try --offline if it was downloaded before, or give a local folder",
        )

    def unusable(self, why: str) -> Diagnostic:
        """Return the error for an unusable answer."""
        return Diagnostic(
            "E334",
            f"the answer of {self.at} for {self.where} is unusable: {why}",
            "try again, or give another revision",
        )


def _note(ref: Path, commit: str) -> None:
    """Record the commit of a completely downloaded revision where huggingface_hub looks it up when offline."""
    ref.parent.mkdir(parents=True, exist_ok=True)
    partial = ref.with_name(f".{ref.name}.{os.getpid()}")
    partial.write_text(commit)
    partial.replace(ref)


def _line(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
