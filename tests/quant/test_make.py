"""`llmc quantize` writes checkpoints that every decoder reads alike, never worse than llmcompressor's own rounding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draw import of_test
from models.kit import fails
from quant.make.common import base
from quant.reference import decode as reference
from quant.test_decode import FIXTURES, opened
from safetensors.torch import load_file, save_file

from llmc.cli import main
from llmc.console import Quiet
from llmc.frontend.safetensors_reader import TensorFiles
from llmc.ir.ops import OPS
from llmc.quant.make.folder_writer import ShardWriter, pack
from llmc.quant.make.plan import Settings
from llmc.quant.make.quantize_model import quantize_model
from llmc.quant.make.recipes import RECIPES, ROUNDED
from llmc.quant.make.rounding import round_to_nearest

pytestmark = pytest.mark.drawn
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of the base models, each saved once."""
    saved: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in saved:
            saved[name, dtype] = tmp_path_factory.mktemp(name)
            base(name, dtype).save_pretrained(saved[name, dtype])
        return saved[name, dtype]

    return folder


def made(model: Path, out: Path, scheme: str, **more: Any) -> Path:
    quantize_model(model, out, Settings(scheme, **more), Quiet())
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


CASES = [
    ("int8", "qwen2", {}),
    ("int8", "qwen2", {"group_size": 32}),
    ("w8a8", "llama", {}),
    ("fp8", "qwen2", {}),
    ("fp8-block", "llama", {}),
    ("int4", "llama", {"group_size": 32}),
    ("int4", "llama256", {}),
    ("int4", "mixtral", {"group_size": 32}),
    ("fp8", "qwen3_moe", {}),
]


@pytest.mark.parametrize(("scheme", "model", "more"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_written_checkpoint_is_read_as_it_was_rounded(
    scheme: str, model: str, more: dict[str, Any], dtype: torch.dtype, models: Callable[..., Path], tmp_path: Path
) -> None:
    source = models(model, dtype)
    out = made(source, tmp_path / "out", scheme, **more)
    recipe = Settings(scheme, **more).recipe()
    plain = reference(out)
    found = {
        m: round_to_nearest(w.float(), recipe, dtype).values() for m in plain for w in [weights(source)[f"{m}.weight"]]
    }
    assert all(torch.equal(plain[m], w) for m, w in found.items())
    assert len(plain) == sum(w.ndim == 2 and "embed" not in k and "head" not in k and not k.endswith("gate.weight")
                             for k, w in weights(source).items())  # fmt: skip
    with opened(out) as checkpoint:
        read = [m for m in plain if f"{m}.weight" in checkpoint.names]
        for m in read:
            assert np.array_equal(checkpoint.read(f"{m}.weight"), found[m].numpy()), m
    assert read and (len(read) == len(plain) or "mix" in model or "moe" in model)


# Fixtures that llmcompressor wrote by rounding to nearest: scheme, base model, options.
THEIRS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "ct-w8a16-head": ("int8", "llama_short", {}),
    "ct-w8a8": ("w8a8", "qwen2", {}),
    "ct-fp8-dynamic": ("fp8", "qwen2", {}),
    "ct-fp8-block": ("fp8-block", "llama256", {}),
    "ct-fp8-block-ragged": ("fp8-block", "qwen2", {}),
    "ct-w4a16-g128": ("int4", "llama256", {"ignore": ("re:.*o_proj",)}),
    "ct-moe-w4a16": ("int4", "qwen3_moe", {"group_size": 32}),
    "ct-moe-fp8": ("fp8", "qwen3_moe", {}),
}


@pytest.mark.parametrize("name", THEIRS)
def test_scales_equal_llmcompressors_and_codes_are_at_least_as_near(
    name: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    scheme, model, more = THEIRS[name]
    source = models(model)
    out = made(source, tmp_path / "out", scheme, **more)
    ours, theirs, original = weights(out), weights(FIXTURES / name), weights(source)
    head = {k for k in theirs if k.startswith("lm_head.")}
    assert ours.keys() - {"lm_head.weight"} == theirs.keys() - head - {"lm_head.weight"}
    for key in ours.keys() - head - {"lm_head.weight"}:
        assert (ours[key].dtype, ours[key].shape) == (theirs[key].dtype, theirs[key].shape), key
        if not key.endswith((".weight", ".weight_packed")) or "norm" in key or "embed" in key:
            assert torch.equal(ours[key], theirs[key]), key
    mine, other = reference(out), reference(FIXTURES / name)
    for module, w in mine.items():
        wanted = original[f"{module}.weight"].float()
        assert bool(((w - wanted).abs() <= (other[module] - wanted).abs()).all()), module
        assert float((w == other[module]).float().mean()) > 0.85, module


@pytest.mark.parametrize("name", THEIRS)
def test_the_configuration_says_what_llmcompressors_says(
    name: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    scheme, model, more = THEIRS[name]
    out = made(models(model), tmp_path / "out", scheme, **more)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (out, FIXTURES / name))
    for part in ("weights", "input_activations"):
        a, b = (c["quantization_config"]["config_groups"]["group_0"][part] for c in (ours, theirs))
        assert (a is None) == (b is None) and all(b[k] == v for k, v in (a or {}).items()), part
    got, want = ours["quantization_config"], theirs["quantization_config"]
    assert all(got[k] == want[k] for k in ("format", "quant_method", "quantization_status", "kv_cache_scheme"))
    assert set(got["ignore"]) == set(want["ignore"]) | {"lm_head"}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_compile_rounds_as_the_command_does(name: str) -> None:
    """`llmc compile --quant` and `llmc quantize` give the same numbers, also of a block of zeros."""
    recipe = RECIPES[name] if name != "int4" else RECIPES[name].grouped(32)
    w = torch.randn(13, 160, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    w[2, 32:64] = 0
    f = recipe.weight_format("f32")
    got = OPS["quantize"].ref(w.numpy(), code=f.code, block=f.block, scale=f.scale, zero=f.zero)
    np.testing.assert_array_equal(got, round_to_nearest(w, recipe, torch.bfloat16).values().numpy())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_hold_every_code(bits: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (5, 37), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    raw = pack(codes, bits).numpy().view(np.uint32)
    found = (raw[:, :, None] >> (np.arange(32 // bits) * bits).astype(np.uint32)) & ((1 << bits) - 1)
    assert np.array_equal(found.reshape(5, -1)[:, :37].astype(int) - half, codes.numpy())


def test_shards_hold_all_tensors(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, limit=300)
    values = {f"t{i}": torch.full((4, 8), float(i)) for i in range(5)}  # 128 bytes each
    for name, x in values.items():
        writer.add(name, x)
    assert writer.finish() == 3 and writer.total == 5 * 128
    files = TensorFiles(tmp_path)
    assert len(files.files) == 3
    assert all(np.array_equal(files.read(k, slice(None)), v.numpy()) for k, v in values.items())
    files.close()


def test_shards_of_several_dtypes_are_read_by_safetensors(tmp_path: Path) -> None:
    """Each tensor begins at a multiple of its element's size, after bytes of odd counts."""
    draw = torch.Generator().manual_seed(of_test())
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float32, torch.int64)
    values = {f"{i}": torch.randint(0, 99, (3, 5), generator=draw).to(dtype).T for i, dtype in enumerate(dtypes)}
    values |= {"scalar": torch.tensor(2.5, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}
    writer = ShardWriter(tmp_path)
    for name, x in values.items():
        writer.add(name, x)
    assert writer.finish() == 1 and [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == values.keys()
    for name, x in values.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name].float(), x.float()), name


class Stops(Quiet):
    """Progress that notes whether the output exists, and interrupts the run at the fourth tensor."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def part(self, name: str, done: int, of: int, unit: str = "") -> None:
        assert not self.out.exists()
        if done == 4:
            raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing(models: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "there" / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_model(models("llama"), out, Settings("int8"), Stops(out))
    assert not list(out.parent.iterdir())


def test_unsuitable_input_is_refused(models: Callable[..., Path], tmp_path: Path) -> None:
    model, out = models("llama"), tmp_path / "out"

    def run(code: str, *words: str, model: Path = model, scheme: str = "int4", **more: Any) -> None:
        fails(code, *words, do=lambda: made(model, out, scheme, **more))
        assert not list(tmp_path.glob("*out*"))

    run("E350", "quantised already", model=FIXTURES / "ct-w8a8")
    run("E351", "int3", "gptq", scheme="int3")
    run("E351", "no groups", scheme="fp8", group_size=64)
    run("E351", "needs texts", scheme="gptq")
    run("E351", "uses no texts", calibrate=tmp_path / "text")
    run("E351", "matches no linear module", ignore=("model.layers.7",), group_size=32)
    run("E351", "regular expression", ignore=("re:(",), group_size=32)
    run("E352", "layers.0.mlp.down_proj.weight", "160", "--group-size 32")
    run("E352", "columns are not groups of 96", group_size=96)
    pattern = "--ignore 're:.*\\.(down_proj)$'"
    run("E352", "(5 weights have", "--group-size 32", pattern, model=models("qwen3_moe"), group_size=64)
    run("E350", "no linear modules", ignore=("re:.*",))
    run("E301", "does not exist", model=tmp_path / "nothing")


class Notes(Quiet):
    """Keeps the lines of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_the_plan_names_what_stays_or_cannot_run_elsewhere(models: Callable[..., Path], tmp_path: Path) -> None:
    """gpt-oss, too, whose attention has no fused implementation."""
    notes = Notes()
    quantize_model(models("gpt_oss"), tmp_path / "stacks", Settings("int8"), notes)
    assert any("stacks of experts: 4 tensors" in line and "gate_up_proj" in line for line in notes.lines), notes.lines
    with opened(tmp_path / "stacks") as checkpoint:
        assert len(checkpoint.formats) == 8
    quantize_model(models("llama"), tmp_path / "tiles", Settings("fp8-block"), notes := Notes())
    assert any("not a multiple of 128: 4 weights" in line for line in notes.lines), notes.lines


def test_weights_that_are_not_finite_are_refused(models: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((models("llama") / "config.json").read_text())
    values = weights(models("llama"))
    values[f"{Q}.weight"][3, 5] = float("inf")
    save_file(values, model / "model.safetensors")
    fails("E350", f"{Q}.weight", do=lambda: made(model, tmp_path / "out", "int8"))


def test_an_existing_output_is_kept(models: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    fails("E120", "exists", do=lambda: made(models("llama"), tmp_path, "int8"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_command_prints_the_plan_and_the_outcome(
    models: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["quantize", str(models("qwen2")), str(tmp_path / "out"), "--scheme", "w8a8", "--json"]
    assert main(args) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["weights"] == 7 and facts["bytes_after"] < facts["bytes_before"]
    assert facts["bytes_after"] == sum(x.nbytes for x in weights(tmp_path / "out").values())
    assert "7 weights" in shown.err and "int8, scales for rows, int-quantized" in shown.err
    assert main(args) == 1 and "LLMC-E120" in capsys.readouterr().err


def test_every_scheme_is_listed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    shown = capsys.readouterr().out
    assert all(f"{name} (" in " ".join(shown.split()) for name in RECIPES)
