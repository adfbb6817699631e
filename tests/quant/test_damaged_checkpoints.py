"""Random damage to the tensors and the configuration of quantised checkpoints: one error, or the same weights.

`python tests/quant/test_damaged_checkpoints.py MINUTES [SEED]` tries all fixtures for some time.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from corpus.damage import changed
from quant.test_decode import FILE, FIXTURES, READ
from safetensors import safe_open
from safetensors.torch import save_file

from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.model_folder import open_source
from llmc.frontend.quantization_files import KEY, with_quantization
from llmc.frontend.trace_model import Traced, trace
from llmc.quant.decoder import decoder_of

SIZES = ("weight_block_size", "block_structure")  # tiles of another size may need equally many scales
# Of the names of tensors of scales, and of numbers that are added to weights.
SCALES, OFFSETS = ("scale", "SCB", "absmax"), ("zero", "shift", "biases")
DTYPES = (torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)
KV = (".k_scale", ".v_scale")
OPTIONAL = ("_weight_per_tensor_scale",)
GROUPS = (".embedding_scale",)  # the number of its columns gives the size of a group
Tensors = dict[str, torch.Tensor]


class Fixture:
    """A fixture that is traced once, and damaged many times."""

    def __init__(self, name: str) -> None:
        folder = FIXTURES / name
        self.config = open_source(folder).config
        self.traced: Traced = trace(folder, dtype="f32")
        with safe_open(folder / FILE, "pt") as f:
            self.tensors: Tensors = {k: f.get_tensor(k) for k in f.keys()}
            self.texts = f.metadata()
        self.quantised = sorted(k for k in self.tensors if not k.endswith((".weight", "bias")))
        self.want = self.read(folder, self.config)

    def read(self, folder: Path, config: Mapping[str, Any]) -> int | None:
        """A checksum of all weights and scales of the KV cache; None if the configuration is empty."""
        decoder = decoder_of(config, load().schemes)
        if decoder is None:
            return None
        total = 0
        with Checkpoint(self.traced, folder, decoder) as checkpoint:
            for name in sorted(checkpoint.names):
                total = zlib.crc32(checkpoint.read(name).tobytes(), total)
            for layer, scales in sorted(checkpoint.kv_scales.items()):
                total = zlib.crc32(b"".join(x.tobytes() for x in scales), total + layer)
        return total

    def damaged_config(self, rng: Random) -> tuple[int | None, str]:
        other, words = changed(self.config[KEY], rng)
        config = {k: v for k, v in self.config.items() if k not in (KEY, "quantization")}
        return self.read(self.traced.source.folder, with_quantization({**config, KEY: other}, {})), words

    def damaged_tensors(self, rng: Random, at: Path) -> tuple[dict[str, torch.Tensor], str, str]:
        """The tensors with one changed; the change in words; the name of the tensor."""
        kind = rng.choice(("drop", "number", "number", "dtype", "shape", "shape", "index", "rename", "extra"))
        name = self._choose(rng, kind)
        tensors, x = dict(self.tensors), self.tensors[name]
        if kind in ("drop", "rename"):
            tensors.pop(name)
        if kind == "rename":
            tensors[name + rng.choice(("s", "_0", ".part", ""))[:5] + "x"] = x
        elif kind == "number":
            number = rng.choice((float("nan"), float("inf"), -float("inf"), *([0.0] if _is(name, SCALES) else [])))
            tensors[name] = _with(x, rng, number)
            kind += f" {number}"
        elif kind == "dtype":
            other = rng.choice(DTYPES)
            tensors[name] = (x.float().nan_to_num() if x.dtype.is_floating_point else x).to(other)
            kind += f" {other}"
        elif kind == "shape":
            tensors[name] = _reshaped(x, rng)
            kind += f" {list(x.shape)} to {list(tensors[name].shape)}"
        elif kind == "index":
            tensors[name] = _with(x, rng, rng.choice((-1, 99, 1 << 30, -(1 << 31))))
        elif kind == "extra":
            part = rng.choice(("weight", "qweight", "weight_scale", "scales", "g_idx", "weight_packed", "unknown"))
            new = f"{name.rpartition('.')[0]}.{part}"
            tensors.setdefault(new, x.clone())
            kind, name = f"extra {part}", name if new in self.tensors else new
        save_file({k: v.contiguous() for k, v in tensors.items()}, at / FILE, self.texts)
        return tensors, f"{kind} of {name}", name

    def _choose(self, rng: Random, kind: str) -> str:
        names = self.quantised or sorted(self.tensors)
        if kind == "index":
            names = [n for n in names if "idx" in n] or names
        elif kind == "number":
            names = [n for n in names if _is(n, SCALES + OFFSETS) and self.tensors[n].dtype.is_floating_point] or names
        return rng.choice(names)

    def cut(self, rng: Random, at: Path) -> None:
        """Write the file without its end."""
        data = (self.traced.source.folder / FILE).read_bytes()
        (at / FILE).write_bytes(data[: rng.randrange(len(data))])

    def try_one(self, rng: Random, at: Path) -> tuple[str, str]:
        """Damage and read; returns what was done and "accepted" or the error's code. AssertionError: other weights."""
        words, name = "", ""
        try:
            kind = rng.random()
            if kind < 0.35:
                found, words = self.damaged_config(rng)
                assert found in (self.want, None) or any(size in words for size in SIZES), f"other weights: {words}"
                return words, "accepted"
            tensors = self.tensors
            if kind < 0.4:
                self.cut(rng, at)
                words = "cut"
            else:
                tensors, words, name = self.damaged_tensors(rng, at)
            same = self.read(at, self.config) == self.want
            assert same or self._means_other(tensors, words, name), f"other weights: {words}"
            return words, "accepted"
        except Diagnostic as e:
            assert e.code.startswith("E3") and e.remedy, f"{words}: {e}"
            module = name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
            assert module in str(e) or _all(e), f"{words}: {e}"
            return words, e.code

    def _means_other(self, tensors: Tensors, words: str, name: str) -> bool:
        """Whether the damaged checkpoint is a valid one of other numbers.

        Such are another 8-bit scale or integer, a number of a tensor that is not quantised, a scale of another dtype or
        of the whole tensor, a square one that is transposed, an optional one that is missing, and a scale of the KV
        cache that is missing or one for each head.
        """
        kind = words.split()[0] if words else ""
        if name.endswith(KV):
            return kind in ("drop", "rename", "shape", "index")
        if name.endswith(OPTIONAL) and kind in ("drop", "rename"):
            return True
        if kind == "number":
            x = tensors[name]
            plain = not x.dtype.is_floating_point or not _is(name, SCALES + OFFSETS)
            return plain or (x.element_size() == 1 and "nan" not in words)
        if kind == "dtype":
            return _is(name, SCALES)
        if kind == "shape":
            old, new = self.tensors[name].shape, tensors[name].shape
            return old == new or (_is(name, SCALES) and tensors[name].numel() == 1) or name.endswith(GROUPS)
        return kind == "index" and "idx" not in name


def _is(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.rpartition(".")[2] for word in words)


def _all(e: Diagnostic) -> bool:
    """Whether an error names tensors of the model instead of stored ones, or lists several."""
    return e.code in ("E323", "E324", "E325", "E326")


def _with(x: torch.Tensor, rng: Random, number: float) -> torch.Tensor:
    """A copy with one other element, as near to `number` as the dtype has."""
    out = x.clone()
    if not out.numel():
        return out
    place = rng.randrange(out.numel())
    if x.dtype == torch.float8_e8m0fnu:
        out.view(torch.uint8).view(-1)[place] = 255
    elif x.dtype.is_floating_point:
        wide = out.float().view(-1)
        wide[place] = number
        out = wide.view(x.shape).to(x.dtype)
    else:
        info = torch.iinfo(x.dtype)
        whole = 255 if number != number or abs(number) == float("inf") else int(number)
        out.view(-1)[place] = max(info.min, min(info.max, whole))
    return out


def _reshaped(x: torch.Tensor, rng: Random) -> torch.Tensor:
    kind = rng.choice(("cut", "longer", "flat", "deeper", "empty", "transposed"))
    axis = rng.randrange(x.ndim) if x.ndim else 0
    if not x.ndim or kind == "deeper":
        return x[None]
    if kind == "cut":
        return x.narrow(axis, 0, max(0, x.shape[axis] - rng.choice((1, 8))))
    if kind == "longer":
        return torch.cat([x, x.narrow(axis, 0, 1)], axis) if x.shape[axis] else x[None]
    if kind == "empty":
        return x.narrow(axis, 0, 0)
    return x.flatten() if kind == "flat" else x.movedim(0, -1)


@pytest.mark.drawn
@pytest.mark.parametrize("name", READ)
def test_damage_is_an_error_or_changes_nothing(name: str, tmp_path: Path) -> None:
    rng, fixture, seen = Random(name), Fixture(name), Counter[str]()
    for _ in range(30):
        seen[fixture.try_one(rng, tmp_path)[1]] += 1
    assert len(seen) > 1, seen


def main(minutes: float, seed: int) -> int:
    """Damage all fixtures in turns; prints what is wrong. Returns the number of failures."""
    fixtures: dict[str, Fixture] = {}
    end, failed, seen, turn = time.monotonic() + 60 * minutes, 0, Counter[str](), 0
    with tempfile.TemporaryDirectory() as at:
        while time.monotonic() < end:
            name = READ[turn % len(READ)]
            fixture = fixtures.setdefault(name, fixtures.get(name) or Fixture(name))
            for i in range(20):
                one = f"{seed} {turn} {i}"
                try:
                    seen[fixture.try_one(Random(one), Path(at))[1]] += 1
                except Exception as e:
                    failed += 1
                    print(f"{name} {one!r}: {type(e).__name__} {str(e)[:600]}", flush=True)
            turn += 1
    print(f"{sum(seen.values())} tries of {len(fixtures)} fixtures, {failed} failed: {dict(seen)}")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30))))
