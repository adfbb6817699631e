"""The licences of kernels that contain another project's code, read from its installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from llmc.diagnostics import Diagnostic

_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS")


def license_of(name: str) -> tuple[str, str]:
    """Return ("name-version", all texts of licences and notices) of an installed distribution.

    Raises Diagnostic E506 if it has none: a binary is not written without the licence that allows it.
    """
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise _missing(name, "it is not installed") from None
    files = [f for f in package.files or () if f.name.upper().startswith(_NAMES)]
    license_files = [f for f in files if ".dist-info" in f.parts[0]]
    if not license_files:
        raise _missing(name, f"{package.version} contains no licence")
    texts = [f"{f.name}\n\n{f.read_text()}" for f in license_files]
    fields = package.metadata.json
    license = fields.get("license_expression") or fields.get("license") or ""
    return f"{name}-{package.version}", "\n\n".join([f"{name} {package.version}: {license}", *texts])


def _missing(name: str, why: str) -> Diagnostic:
    return Diagnostic("E506", f"the licence of {name} cannot be stored: {why}", "install the package again")
