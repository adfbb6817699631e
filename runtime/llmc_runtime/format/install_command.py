"""The pip command that adds an extra to this installation, from a checkout, a wheel or a package index.

It is part of error messages only, so that functions import what is slow to import.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "llmc-aot"


def install_command(*extras: str) -> str:
    """Return the command that installs llmc with `extras`, such as `pip install 'llmc-aot[serve]'`.

    If llmc was installed from a checkout or a file, the command names that checkout or file; if that is gone, as in a
    container, it is for a clone.
    """
    names, origin = ",".join(extras), _origin()
    removed = _removed(origin)
    where = f" in a clone (llmc was installed from {removed}, which is gone)" if removed else ""
    return f"{_pip()} install {_quoted(f'.[{names}]') if removed else requirement(names, origin)}{where}"


def requirement(extras: str, origin: str) -> str:
    """Return pip's arguments for llmc with `extras`. `origin` is the text of the distribution's `direct_url.json`
    (PEP 610), or "" if it was installed from an index.
    """
    path, folder = _source(origin)
    if not path:
        return _quoted(f"{DISTRIBUTION}[{extras}]")
    if folder is None:
        return _quoted(f"{path}[{extras}]")
    option = "-e " if folder.get("editable") else ""
    return option + _quoted(f"{path}[{extras}]")


def _source(origin: str) -> tuple[str, dict[str, bool] | None]:
    """Return the path of the checkout or file in the text of a `direct_url.json`, and its entry about a checkout."""
    record = json.loads(origin) if origin else {}
    url = urlsplit(record.get("url", ""))
    return (unquote(url.path), record.get("dir_info")) if url.scheme == "file" else ("", None)


def _removed(origin: str) -> str:
    """Return the path of the checkout or file if it no longer exists, else ""."""
    path, _ = _source(origin)
    return path if path and not Path(path).exists() else ""


def _origin() -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(DISTRIBUTION).read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return ""


def _pip() -> str:
    """Return `pip` if the shell finds that of this environment, else the way to run it by its interpreter."""
    from shutil import which

    pip = which("pip")
    is_own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return "pip" if is_own else f"{_quoted(sys.executable)} -m pip"


def _quoted(text: str) -> str:
    """Return a text as one word of a shell."""
    from shlex import quote

    return quote(text)
