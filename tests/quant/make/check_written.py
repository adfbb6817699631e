"""Read checkpoints of `llmc quantize` with compressed-tensors and transformers: `python check_written.py FOLDER...`.

Runs in the environment of `compressed.py`. For each folder: every weight as compressed-tensors decompresses it (scales
made float32 first) against the plain decoder of reference.py, bit for bit; then the logits of transformers' own loader
against those of a float32 model with these weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import expected, tensors
from compressed import dequantised, producer_logits
from compressed_tensors.quantization import QuantizationScheme
from reference import decode


def check(folder: Path) -> str:
    """Compare one checkpoint; returns a line of figures."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    made = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    plain = decode(folder)
    stored = tensors(folder)
    for module, weight in plain.items():
        local = {k.removeprefix(f"{module}."): v for k, v in stored.items() if k.rpartition(".")[0] == module}
        local.pop("bias", None)
        theirs = dequantised(local, made)
        if not torch.equal(theirs, weight):
            raise SystemExit(f"{folder.name}: {module} differs, at most by {(theirs - weight).abs().max()}")
    want = expected(folder, plain)
    own, note = producer_logits(folder)
    if own is None:
        raise SystemExit(f"{folder.name}: {note}")
    error = float((own - want).norm() / want.norm())
    return f"{folder.name}: {len(plain)} weights equal; transformers' logits differ by {error:.5f}{note}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(check(Path(name)))
