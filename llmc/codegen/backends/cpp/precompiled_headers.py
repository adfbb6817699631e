"""The system headers of C++ kernels, precompiled: to parse immintrin.h takes longer than to compile most kernels."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HEADERS = ("immintrin.h", "math.h", "stdint.h", "string.h")
SLOW_INCLUDE = "#include <immintrin.h>"  # kernels without it compile as fast without precompiled headers
MIN_KERNELS = 6  # kernels; precompiling takes as long as parsing the headers this often
_TEXT = "".join(f"#include <{name}>\n" for name in HEADERS)


def precompiled(command: Sequence[str], version: str, cache: Path, kernels: int) -> Path | None:
    """Return the header that kernels include first (-include), in `cache`; GCC finds its precompiled form next to it.

    command: the compiler and its flags. version: the compiler's. kernels: how many kernels are to be compiled. None if
    there is no precompiled form and too few kernels to make one, or if it cannot be made; kernels compile without it,
    to the same binaries. GCC ignores a form that other flags or another compiler made.
    """
    digest = hashlib.sha256("\0".join([_TEXT, version, *command[1:]]).encode()).hexdigest()[:32]
    header = cache / f"headers-{digest}" / "headers.h"
    if header.is_file():
        return header
    if kernels < MIN_KERNELS:
        return None
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as tmp:
        folder = Path(tmp, "made")
        folder.mkdir()
        (folder / header.name).write_text(_TEXT)
        argv = [*command, "-c", "-x", "c++-header", header.name, "-o", f"{header.name}.gch"]
        if subprocess.run(argv, cwd=folder, capture_output=True).returncode:
            return None
        try:
            os.rename(folder, header.parent)
        except OSError:  # another process has made it meanwhile
            pass
    return header if header.is_file() else None
