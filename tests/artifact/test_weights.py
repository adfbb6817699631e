"""The weights graph in row blocks: equal to the interpreter bit for bit, in files others read, in little memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from artifact.tiny import Checkpoint

from llmc.artifact import weights as weights_module
from llmc.artifact.files import Files
from llmc.artifact.weights import write_weights
from llmc.diagnostics import Diagnostic
from llmc.ir import weight_eval as blocks_module
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph, Value
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.ir.weight_eval import Blocks, narrow, widen

BF16 = np.dtype(ml_dtypes.bfloat16)


def drawn(*shape: int, dtype: np.dtype = BF16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def build() -> tuple[Graph, Checkpoint]:
    """Every rule at least once, nested, over awkward sizes."""
    g = Graph("weights")
    b = Builder(g, OPS)
    source: dict[str, np.ndarray] = {}

    def weight(name: str, dtype: str, *shape: int) -> Value:
        kind = {"bf16": BF16, "f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}[dtype]
        source[name] = drawn(*shape, dtype=kind, seed=len(source))
        return g.input(name, tensor(dtype, *shape), weight=True)

    def words(name: str, dtype: str, *shape: int, below: int = 0) -> Value:
        limits = np.iinfo(DTYPES[dtype].np)
        low, high = (0, below) if below else (limits.min, limits.max)
        source[name] = np.random.default_rng(len(source)).integers(low, high, shape, DTYPES[dtype].np)
        return g.input(name, tensor(dtype, *shape), weight=True)

    def output(name: str, v: Value) -> None:
        v.name = name
        g.outputs.append(v)

    q, k, v = (weight(f"{n}.weight", "bf16", rows, 37) for n, rows in (("q", 40), ("k", 12), ("v", 12)))
    gain, scale = weight("norm.weight", "bf16", 37), weight("scale", "f32")
    conv, embed = weight("conv", "f16", 37, 50), weight("embed", "f32", 101, 37)
    qkv = b.concat(q, k, v, axis=0)
    output("qkv", b.pack_panel(b.mul(qkv, gain), rows=16, pair=2))
    joined = b.concat(q, b.cast(b.transpose(conv, perm=(1, 0)), dtype="bf16"), axis=0)
    output("gate_up", b.pack_panel(joined, rows=8, pair=2, parts=2))
    output("turned", b.transpose(b.reshape(qkv, shape=(8, 8, 37)), perm=(1, 2, 0)))
    output("cut", b.slice(b.slice(embed, axis=0, start=3, stop=99, step=2), axis=1, start=1, stop=30))
    output("wide", b.cast(b.reshape(b.concat(embed, embed, axis=1), shape=(202, 37)), dtype="bf16"))
    output("spread", b.broadcast(b.add(gain, b.cast(scale, dtype="bf16")), shape=(9, 37)))
    output("normed", b.rms_norm(embed, b.cast(gain, dtype="f32"), eps=1e-5))
    output("sum", b.sum(embed, axis=0, keepdim=False))
    output("fused", b.fused(embed, gain, body=["mul(a0, rsqrt(row_mean(mul(a0, a0))))"], dtypes=["f16"]))
    output("total", b.fused(b.mul(scale, scale), scale, body=["add(exp(a0), a1)"], dtypes=["f32"]))
    quantised(b, words, output)
    g.outputs.append(gain)
    g.outputs.append(scale)
    return g, Checkpoint(**source)


def quantised(b: Builder, words: Callable[..., Value], output: Callable[[str, Value], None]) -> None:
    """Codes packed along either axis, groups by index, and blocks that do not divide the weight."""
    packed, turned, octets = words("packed", "i32", 21, 9), words("turned", "i32", 12, 37), words("octets", "u8", 37, 8)
    output("three", b.unpack_bits(packed, bits=3, axis=1, size=93, add=1))
    output("three_down", b.unpack_bits(packed, bits=3, axis=0, size=223))
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    code = b.unpack_bits(turned, bits=4, axis=0, size=91, order=order, word_add=0x11111111)
    output("four_down", code)
    output("floats", b.cast(b.bitcast(octets, dtype="f8e8m0"), dtype="f32"))
    narrow = b.unpack_bits(octets, bits=4, axis=1, size=15)
    output("codes", b.pack_panel(b.pack_codes(code, bits=4), rows=8, pair=4))
    output("octets8", b.pack_codes(octets, bits=8))
    output("fragments", b.pack_fragments(words("sixteen", "u8", 192, 128, below=16)))
    zero = b.slice(octets, axis=1, start=3, stop=8)
    scale = b.cast(b.slice(octets, axis=1, start=0, stop=5), dtype="f32")
    output("group", b.dequantize(narrow, scale, zero, block=(1, 3), dtype="bf16"))
    by_index = b.take_columns(scale, words("g_idx", "i32", 15, below=5))
    output("by_index", b.dequantize(narrow, by_index, block=(1, 1), zero_point=8, dtype="f32"))
    tiles = b.cast(b.slice(b.slice(octets, axis=0, start=0, stop=7), axis=1, start=0, stop=3), dtype="f16")
    output("tiles", b.dequantize(code, tiles, block=(14, 14), values="e2m1", dtype="f32"))
    expert = b.reshape(narrow, shape=(1, 37, 15))
    scales = b.reshape(b.slice(scale, axis=0, start=0, stop=2), shape=(2, 1, 5))
    output("experts", b.dequantize(b.concat(expert, expert, axis=0), scales, block=(0, 3), dtype="f32"))
    stack = b.reshape(b.cast(b.concat(octets, octets, octets, axis=0), dtype="f32"), shape=(3, 37, 8))
    rounded = b.quantize_scale(stack, code="u4", block=(4, 3), dtype="f32")
    output("stack_scales", rounded)
    codes = b.quantize_code(stack, rounded, code="u4", block=(4, 3), zero_point=8)
    output("stack_codes", b.pack_nibbles(codes, half=2))


@pytest.mark.parametrize("target", [1, 150, 1 << 20])
def test_blocks_equal_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: int) -> None:
    library = pytest.importorskip("safetensors.numpy")
    monkeypatch.setattr(weights_module, "ROW_BLOCK_BYTES", target)
    g, source = build()
    held = [source.tensors[v.name] for v in g.inputs]
    want = run(g, [x if x.dtype.kind in "iu" else x.astype(np.float32) for x in held])
    (file,) = write_weights(g, source, Files(tmp_path))
    data = (tmp_path / file.file).read_bytes()
    assert len(data) == file.bytes and len(file.blocks) == 1
    found = library.load_file(tmp_path / file.file)
    for v, x in zip(g.outputs, want, strict=True):
        got = found[v.name]
        assert got.dtype == DTYPES[v.type.dtype].np, v.name
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32), err_msg=v.name)


def test_any_rows_of_any_value() -> None:
    g, source = build()
    blocks = Blocks(g, source)
    for v in g.outputs:
        if not v.type.rank:
            continue
        whole = blocks.whole(v)
        n = whole.shape[0]
        for lo, hi in ((0, n), (0, 1), (n - 1, n), (n // 3, n // 2 + 1), (2 % n, 2 % n)):
            np.testing.assert_array_equal(blocks.rows(v, lo, hi), whole[lo:hi], err_msg=f"{v.name} [{lo}, {hi})")


def test_rounding_is_that_of_the_library() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0x7F800001], np.uint32)
    near = np.arange(0x3F800000, 0x3F820000, dtype=np.uint32)
    x = np.concatenate([bits, special, near]).view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(narrow(x, "bf16").view(BF16).astype(np.float32), want)
    back = widen(np.arange(1 << 16, dtype=np.uint16), "bf16")
    np.testing.assert_array_equal(back, np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32))


def test_bytes_that_only_move_are_not_touched() -> None:
    """NaNs with payloads and negative zeros survive slices, joins, turns and packing."""
    raw = np.random.default_rng(2).integers(0, 1 << 16, (64, 6), dtype=np.uint16)
    g = Graph("weights")
    b = Builder(g, OPS)
    w = g.input("w", tensor("bf16", 64, 6), weight=True)
    turned = b.transpose(b.concat(w, w, axis=1), perm=(1, 0))
    packed = b.pack_panel(b.slice(w, axis=0, start=0, stop=32), rows=16, pair=2)
    g.outputs = [turned, packed]
    blocks = Blocks(g, Checkpoint(w=raw.view(BF16)))
    np.testing.assert_array_equal(blocks.rows(turned, 0, 12), np.concatenate([raw, raw], 1).T)
    want = raw[:32].reshape(2, 16, 3, 2).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(blocks.rows(packed, 0, 2), want)


def test_several_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights_module, "SHARD_BYTES", 5000)
    g, source = build()
    files = write_weights(g, source, Files(tmp_path))
    assert len(files) > 3 and [f.file for f in files[:2]] == ["weights/00000.safetensors", "weights/00001.safetensors"]


@pytest.mark.parametrize("wrong", [drawn(64, dtype=np.dtype(np.float32)), np.zeros(63, np.int32)])
def test_a_source_that_answers_something_else(tmp_path: Path, wrong: np.ndarray) -> None:
    g = Graph("weights")
    g.outputs = [g.input("table", tensor("i32", 64), weight=True)]
    with pytest.raises(Diagnostic, match=r"E124.*%table reads as .*, the graph declares int32\[64\]"):
        write_weights(g, Checkpoint(table=wrong), Files(tmp_path))


def test_whole_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "KEEP", 100)
    g = Graph("weights")
    b = Builder(g, OPS)
    ws = [g.input(f"w{i}", tensor("f32", 8, 5), weight=True) for i in range(6)]
    g.outputs = [b.transpose(b.mul(w, w), perm=(1, 0)) for w in ws]
    blocks = Blocks(g, Checkpoint(**{w.name: drawn(8, 5, dtype=np.dtype(np.float32)) for w in ws}))
    for v in g.outputs:
        blocks.rows(v, 0, 5)
        assert len(blocks._whole) == 1


CHILD = """
import sys, threading, time
sys.path[:0] = {path!r}
from pathlib import Path
import ml_dtypes, numpy as np
from llmc.artifact.files import Files
from llmc.artifact.weights import write_weights
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor

root, layers, n = Path(sys.argv[1]), 24, 3072
data = np.memmap(root / "ckpt", np.uint16, "r", shape=(layers, n, n))
class Source:
    def read(self, name, rows):
        return np.array(data[int(name[1:])][rows]).view(ml_dtypes.bfloat16)
g = Graph("weights"); b = Builder(g, OPS)
for i in range(layers):
    w = g.input(f"w{{i}}", tensor("bf16", n, n), weight=True)
    w = b.transpose(w, perm=(1, 0)) if i % 3 == 2 else b.mul(w, w) if i % 3 else w
    v = b.pack_panel(w, rows=16, pair=2); v.name = f"p{{i}}"; g.outputs.append(v)
def anon():
    return int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1]) >> 10
base, peak, on = anon(), 0, True
def watch():
    global peak
    while on:
        peak = max(peak, anon()); time.sleep(0.002)
t = threading.Thread(target=watch); t.start()
files = write_weights(g, Source(), Files(root))
on = False; t.join()
print(base, peak, sum(f.bytes for f in files) >> 20, (n * n * 2) >> 20)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of 24 times its largest tensor; a third of it must be held whole to be turned."""
    rng = np.random.default_rng(0)
    with (tmp_path / "ckpt").open("wb") as file:
        for _ in range(24):
            file.write(rng.bytes(3072 * 3072 * 2))
    code = CHILD.format(path=[p for p in sys.path if p])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    base, peak, total, largest = map(int, done.stdout.split())
    print(f"anonymous memory {base} -> {peak} MiB; checkpoint {total} MiB, largest tensor {largest} MiB")
    assert total >= 430 and peak - base < largest * 3 + 160
