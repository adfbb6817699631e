"""The pip command that adds an extra to this installation, from a checkout, a wheel or a package index."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "llmc-aot"


def install_command(*extras: str) -> str:
    """Return the command that installs llmc with `extras`, such as `pip install 'llmc-aot[serve]'`.

    If llmc was installed from a checkout or a file, the command names that checkout or file.
    """
    return f"{_pip()} install {requirement(','.join(extras), _origin())}"


def requirement(extras: str, origin: str) -> str:
    """Return pip's arguments for llmc with `extras`. `origin` is the text of the distribution's `direct_url.json`
    (PEP 610), or "" if it was installed from an index.
    """
    record = json.loads(origin) if origin else {}
    url = urlsplit(record.get("url", ""))
    if url.scheme != "file":
        return shlex.quote(f"{DISTRIBUTION}[{extras}]")
    path = unquote(url.path)
    folder = record.get("dir_info")
    if folder is None:
        return shlex.quote(f"{path}[{extras}]")
    option = "-e " if folder.get("editable") else ""
    return option + shlex.quote(f"{path}[{extras}]")


def _origin() -> str:
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        return distribution(DISTRIBUTION).read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return ""


def _pip() -> str:
    """Return `pip` if the shell finds that of this environment, else the way to run it by its interpreter."""
    found = shutil.which("pip")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip" if here else f"{shlex.quote(sys.executable)} -m pip"
