"""Memory of a process that reads weights does not grow with the files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from llmc.frontend.safetensors_reader import TensorFiles


def test_read_pages_of_a_file_are_released(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    stored = np.arange(1 << 22, dtype=np.float32).reshape(4096, 1024)
    save_file({"w": stored}, file)
    with closing(TensorFiles(tmp_path)) as files:
        for start in range(0, 4096, 1000):  # blocks that begin within pages
            assert np.array_equal(files.read("w", slice(start, start + 1000)), stored[start : start + 1000])
        resident = 0
        lines = iter(Path("/proc/self/smaps").read_text(errors="replace").splitlines())
        for line in lines:
            if line.endswith(str(file)):
                resident += int(next(x for x in lines if x.startswith("Rss:")).split()[1]) << 10
    assert resident < stored.nbytes // 8
