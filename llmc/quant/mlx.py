"""MLX checkpoints (the key `quantization` of config.json), and those of transformers' `quant_method: metal`.

Tensors of a weight [n, k]: weight uint32, a stream of codes along k, the lowest bits first; scales [n, k / group_size];
and in the mode "affine" biases (`qbiases` of metal) of the same shape. The name of a module in the configuration has
settings of its own, or false if it is not quantised.

mode     codes                                 value
affine   integers of 2, 3, 4, 5, 6 or 8 bits   code * scale + bias
mxfp4    4-bit floats, groups of 32            code * 2 ** (scale - 127)
mxfp8    8-bit floats (e4m3), groups of 32     code * 2 ** (scale - 127)
nvfp4    4-bit floats, groups of 16            code * scale, an 8-bit float (e4m3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.quant.scheme import (
    AGAIN,
    Codes,
    Stored,
    integer,
    last_part,
    left_out,
    refuse,
    shape_of,
    supported,
    with_offsets,
)

METHOD, METAL = "mlx", "metal"
PARTS = ("weight", "scales", "biases")
BITS = (2, 3, 4, 5, 6, 8)
# Modes of floats -> bits, columns of a group, the dtype of the scales' bytes.
MODES: Mapping[str, tuple[int, int, str]] = MappingProxyType(
    {"mxfp4": (4, 32, "f8e8m0"), "mxfp8": (8, 32, "f8e8m0"), "nvfp4": (4, 16, "f8e4m3")}
)


@dataclass(frozen=True)
class Mlx:
    """The scheme of one checkpoint. method: the one that its configuration names."""

    config: Mapping[str, Any]
    method: str = METHOD

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        if self.method == METHOD:
            return last_part(name, PARTS)
        parts = last_part(name, ("weight", "scales", "qbiases"))
        return parts and (parts[0], parts[1].removeprefix("q"))

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        settings = self._settings(stored.module)
        mode = supported(self.method, "mode", settings.get("mode") or "affine", ("affine", *MODES))
        default_bits, default_size = MODES[mode][:2] if mode != "affine" else (4, 64)
        bits = integer(settings, "bits", self.method, default_bits)
        size = integer(settings, "group_size", self.method, default_size)
        if mode != "affine" and (bits, size) != (default_bits, default_size):
            raise refuse(self.method, f"bits and group_size of {mode}", (bits, size), ((default_bits, default_size),))
        supported(self.method, "bits", bits, BITS)
        n, k = self._shape(stored, bits, size)
        return _affine(stored, bits, size, n, k) if mode == "affine" else _floats(stored, mode, n, k)

    def _settings(self, module: str) -> Mapping[str, Any]:
        """Return the settings of a module; raises Diagnostic E340."""
        value = self.config.get(module)
        if value is False:
            raise left_out(module, f"{module} is false")
        if value is not None and not isinstance(value, Mapping | bool):
            raise Diagnostic("E340", f"quantization_config ({self.method}) has {module} = {str(value)[:80]!r}", AGAIN)
        return value if isinstance(value, Mapping) else self.config

    def _shape(self, stored: Stored, bits: int, size: int) -> tuple[int, int]:
        """Return the weight's rows and columns; raises Diagnostic E341 if words and scales do not fit each other."""
        words, scale = stored.part("weight", ("u32",), 2), stored.part("scales", (*FLOATS, "u8"), 2)
        (n, count), groups = shape_of(words), shape_of(scale)[1]
        k = groups * size
        if size < 1 or count * 32 != k * bits:
            types = f"{words.name} is {words.type} and {scale.name} {scale.type}"
            cause = f"{types}, which are not codes of {bits} bits in groups of {size}"
            raise Diagnostic("E341", cause, AGAIN)
        stored.expect(scale, n, groups)
        return n, k


def mlx(config: Mapping[str, Any]) -> Mlx:
    """Return the scheme of the key `quantization`, which quantization_config repeats."""
    return Mlx(config)


def metal(config: Mapping[str, Any]) -> Mlx:
    """Return the scheme of transformers' kernels for Apple's GPUs, which name one of the tensors differently."""
    return Mlx({key: value for key, value in config.items() if key in ("bits", "group_size", "mode")}, METAL)


def _affine(stored: Stored, bits: int, size: int, n: int, k: int) -> Codes:
    b, scale, offset = stored.build, stored.scales("scales", FLOATS), stored.part("biases", FLOATS, 2)
    stored.expect(offset, n, k // size)
    stored.check_finite(offset)
    code = b.unpack_bits(stored.parts["weight"], bits=bits, axis=1, size=k)
    return with_offsets(b, code, scale, offset, size if size < k else 0, f"{METHOD} {bits} bit")


def _floats(stored: Stored, mode: str, n: int, k: int) -> Codes:
    bits, size, dtype = MODES[mode]
    b, scale = stored.build, stored.part("scales", ("u8",))
    if "biases" in stored.parts:
        raise Diagnostic("E340", f"{stored.module} has biases, which the mode {mode} does not have", AGAIN)
    stored.check_scales(scale, lambda x: x.view(DTYPES[dtype].np))
    code = b.unpack_bits(stored.parts["weight"], bits=bits, axis=1, size=k)
    if bits == 8:
        code = b.bitcast(code, dtype="f8e4m3")
    return Codes(code, b.bitcast(scale, dtype=dtype), (1, size), f"{METHOD} {mode}", values="e2m1" if bits == 4 else "")
