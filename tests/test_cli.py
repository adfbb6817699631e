"""The compiler's command line: its output, the streams that it uses, and the errors for invalid input."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from llmc_runtime.compile_cache import compiled as compiled_for_run
from models.cases import LISTED
from models.kit import save

from llmc.cli import main
from llmc.console import Summary, next_command
from llmc.extension import Extension, combine, load
from llmc.options import Options

Break = Callable[[Path], object]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save(LISTED[0], folder)
    return folder


@pytest.fixture(scope="module")
def compiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cache` and `whole.llmc`, the model compiled with nothing in the cache."""
    folder = tmp_path_factory.mktemp("compiled")
    assert main(["compile", str(model), "-o", str(folder / "whole.llmc"), "--cache", str(folder / "cache")]) == 0
    return folder


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the cache that this compile filled."""
    return Path(shutil.copytree(compiled / "cache", tmp_path / "cache"))


def edit_config(**changes: object) -> Break:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, object]], None]) -> Break:
    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return rewrite


def cut(name: str, size: int) -> Break:
    def truncate(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:size] if size > 0 else data[: len(data) + size])

    return truncate


def corrupt_header(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (folder / "model.safetensors").write_bytes(data)


def index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.norm.weight"
BAD: tuple[tuple[str, Break, str], ...] = (
    ("no config", lambda f: (f / "config.json").unlink(), "config.json"),
    ("config is not JSON", cut("config.json", 20), "config.json"),
    ("unknown architecture", edit_config(model_type="frobnicator"), "frobnicator"),
    ("no model_type", edit_config(model_type=None), "model_type"),
    ("unknown rope type", edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "spiral"),
    ("quantised", edit_config(quantization_config={"quant_method": "gptq"}), "gptq"),
    ("remote code", edit_config(model_type="mine", auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    ("weights cut short", cut("model.safetensors", -64), "model.safetensors"),
    ("weights cut to nothing", cut("model.safetensors", 4), "model.safetensors"),
    ("corrupt header", corrupt_header, "model.safetensors"),
    ("missing shard", index_of_nothing, "model-00001-of-00001.safetensors"),
    ("missing tensor", tensors(lambda t: t.pop(NORM)), NORM),
    ("extra tensor", tensors(lambda t: t.update({"model.extra": t[NORM].clone()})), "model.extra"),  # type: ignore[attr-defined]
    ("wrong shape", tensors(lambda t: t.update({NORM: t[NORM][:5].clone()})), NORM),  # type: ignore[index]
)


@pytest.mark.parametrize(("damage", "named"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_models(damage: Break, named: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    code = main(["compile", str(folder), "-o", str(tmp_path / "out.llmc"), "--no-cache"])
    captured = capsys.readouterr()
    errors = captured.err[captured.err.index("LLMC-E") :].strip().splitlines()
    assert code == 1 and captured.out == ""
    assert named in " ".join(errors) and "Try:" in " ".join(errors) and len(errors) <= 5
    assert "Traceback" not in captured.err
    assert not (tmp_path / "out.llmc").exists()


BINARY = [
    ["opt", "{full}/bytes.llir"], ["roofline", "{full}/bytes.llir"], ["diff", "{full}/bytes.llir", "{full}/bytes.llir"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["compile", "nowhere", "-o", "x.llmc"], 1, "nowhere"),
        (["compile", "{model}", "-o", "x.llmc", "--target", "cpu:z80"], 1, "cpu:z80"),
        (["compile", "{model}", "-o", "x.llmc", "--pipeline", "serve, after nothing: cse"], 1, "nothing"),
        (["compile", "{model}", "-o", "x.llmc", "--max-model-len", "100000000", "--no-cache"], 1, "100000000"),
        (["compile", "{model}", "-o", "{full}", "--no-cache"], 1, "is not an artifact"),
        (["inspect", "nowhere.llmc"], 1, "nowhere.llmc"),
        (["verify", "{full}"], 1, ""),
        (["ops", "lineer"], 1, "linear"),
        (["roofline", "{model}", "--bind", "T=x"], 1, "T=x"),
        (["roofline", "{model}", "--bind", "T=1"], 1, "R"),
        (["opt", "nowhere.llir"], 3, "nowhere.llir"),
        (["opt", "{full}/notes.txt"], 1, "notes.txt, line 1: cannot read 'mine'"),
        (["roofline", "{full}/notes.llir"], 1, "notes.llir, line 1: cannot read 'mine'"),
        *((command, 1, "bytes.llir is not UTF-8 text") for command in BINARY),
        (["compile", "{model}", "-o", "x.llmc", "--tuning", "{full}/bytes.llir"], 1, "it is not UTF-8 text"),
    ],
)
def test_bad_arguments(
    args: list[str], code: int, named: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name in ("notes.txt", "notes.llir"):
        (tmp_path / "full" / name).write_text("mine")
    (tmp_path / "full" / "bytes.llir").write_bytes(b"\x80")
    filled = [a.format(model=model, full=tmp_path / "full") for a in args]
    assert main(filled) == code
    err = capsys.readouterr().err
    assert "LLMC-E" in err and named in err and "Traceback" not in err
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("package", ["llmc", "llmc_runtime"])
def test_the_packages_can_be_run(package: str) -> None:
    run = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("llmc")


@pytest.mark.parametrize("args", ["compile", "compil", "compile m -o x --max-num-seqs 0", "roofline m --peak=nan"])
def test_usage_errors_exit_with_2(args: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(args.split())
    assert e.value.code == 2


def run(*args: str) -> str:
    out = io.StringIO()
    assert main(list(args), out) == 0
    return out.getvalue()


def test_serve_is_the_pipeline_of_the_target_that_is_named(tmp_path: Path) -> None:
    text = "sym T in [1, 64]\ngraph @main(%x: f32[T, 8]) {\n  %y = neg(%x) : f32[T, 8]\n  return %y\n}\n"
    (tmp_path / "x.llir").write_text(text)
    args = ("opt", str(tmp_path / "x.llir"), "-p", "serve, without page-attention", "--time")
    assert "fuse-qkv" in run(*args, "--stop-after", "fuse-qkv", "--target", "cuda:sm_90")
    assert main([*args, "--stop-after", "fuse-qkv", "--target", "cpu:portable"]) == 1  # no pass of the CPU's


def test_a_compile_tells_what_comes_next(tmp_path: Path) -> None:
    """The suggested commands work; without weights, the first one adds them."""
    model, out = tmp_path, Path("m.llmc")
    (tmp_path / "tokenizer.json").write_text("{}")
    for target, weights, words in (
        ("cpu:portable", "packed", "next: llmc-run m.llmc --prompt 'Hello'"),
        ("cuda:sm_90", "random:1", "next, on a machine with an sm_90 GPU: llmc-run m.llmc --prompt 'Hello'"),
        ("cuda:sm_90", "none", f"next: llmc pack m.llmc {tmp_path}"),
        ("hip:gfx942", "packed", "next, on a machine with a gfx942 GPU: llmc-run m.llmc --prompt 'Hello'"),
    ):
        assert next_command(model, out, Options(weights=weights), load().target(target)) == words
    (tmp_path / "tokenizer.json").unlink()
    (line,) = next_command(model, out, Options(), load().target("cpu:portable")).splitlines()
    assert line.startswith("next: python -c ") and "generate([[1, 2, 3]])" in line
    assert Summary("m.llmc", next="next: x").text().endswith("\nnext: x")


def test_roofline_predicts_the_time_of_a_model(model: Path) -> None:
    found = json.loads(run("roofline", str(model), "--bind", "T=3,R=1", "--json", "--by", "node"))
    (graph,) = found["graphs"]
    assert "T" in graph["flops"]
    head = next(r for r in graph["rows"] if r["name"].endswith("lm_head"))
    assert head["flops"] == 2 * 64 * 320
    table = run("roofline", str(model), "--bind", "T=3,R=1", "--peak", "1e12", "--bandwidth", "1e10")
    assert "linear" in table and "1000 GFLOP/s, 10.0 GB/s" in table


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_imports_nothing_heavy(flag: str) -> None:
    code = (
        "import sys\nfrom llmc.cli import main\n"
        f"try: main(['{flag}'])\nexcept SystemExit: pass\n"
        "bad = {'torch', 'numpy', 'transformers', 'triton', 'cuda', 'cupy', 'tokenizers'}\n"
        "bad |= {'llmc_runtime.artifact', 'llmc_runtime.format.manifest', 'llmc_runtime.format.program'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.drawn
def test_weights_may_come_later(
    model: Path, compiled: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiling without weights, then packing, gives the weights of one compile; another model is refused."""
    whole, later = compiled / "whole.llmc", tmp_path / "later.llmc"
    assert main(["compile", str(model), "-o", str(later), "--no-weights", "--cache", str(cache)]) == 0
    assert capsys.readouterr().err.endswith(f"next: llmc pack {later} {model}\n")
    assert not (later / "weights").exists() and main(["verify", str(later)]) == 0
    assert main(["pack", str(later), str(model)]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("next: python -c ") and f"LLM('{later}')" in last
    assert main(["verify", str(later)]) == 0
    shards = [sorted(p.read_bytes() for p in (a / "weights").iterdir()) for a in (whole, later)]
    assert shards[0] == shards[1]
    save(LISTED[2], tmp_path / "other")
    capsys.readouterr()
    assert main(["pack", str(later), str(tmp_path / "other")]) == 1
    assert "LLMC-E328" in capsys.readouterr().err
    assert main(["verify", str(later)]) == 0


@pytest.mark.drawn
def test_an_equal_compile_is_reused(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second compile links the first one's artifact; a damaged entry is built again; other options are others."""
    args = ["--cache", str(cache), "--json"]
    out: list[dict[str, object]] = []
    for i, extra in enumerate(([], ["--max-num-seqs", "3"])):
        main(["compile", str(model), "-o", str(tmp_path / f"{i}.llmc"), *args, *extra])
        out.append(json.loads(capsys.readouterr().out))
    stages = [set(o["seconds"]) for o in out]  # type: ignore[call-overload]
    assert stages[0] == {"reuse"} and "kernels" in stages[1]
    (entry,) = [p for p in (cache / "reuse").glob("*.llmc") if intact_seqs(p) == 16]
    weights = next((entry / "weights").iterdir())
    data = bytearray(weights.read_bytes())
    weights.unlink()
    data[-1] ^= 1
    weights.write_bytes(data)
    main(["compile", str(model), "-o", str(tmp_path / "3.llmc"), *args])
    assert "kernels" in json.loads(capsys.readouterr().out)["seconds"]
    assert main(["verify", str(tmp_path / "3.llmc")]) == 0


def intact_seqs(artifact: Path) -> int:
    return int(json.loads((artifact / "manifest.json").read_text())["limits"]["max_num_seqs"])


@pytest.mark.drawn
def test_equal_compiles_are_equal_byte_for_byte(model: Path, compiled: Path, tmp_path: Path) -> None:
    """The manifest holds the hash of everything: no time, place or order of threads is in an artifact."""
    out = tmp_path / "b" / "elsewhere.llmc"
    assert main(["compile", str(model), "-o", str(out), "--no-reuse", "--cache", str(tmp_path / "other")]) == 0
    assert (out / "manifest.json").read_bytes() == (compiled / "whole.llmc" / "manifest.json").read_bytes()


def test_an_artifact_names_the_extensions_and_options_it_was_compiled_with(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmc import driver

    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples" / "pass")
    mine = Extension("mine", passes={"norm-last": "norm_last:NormLast"})
    registry = replace(combine([*load().extensions, mine]), versions={"mine": "1.2"})
    monkeypatch.setattr(driver, "load", lambda: registry)
    out = str(tmp_path / "mine.llmc")
    pipeline = "serve, after fuse-norm: norm-last"
    assert main(["compile", str(model), "-o", out, "--cache", str(cache), "--pipeline", pipeline]) == 0
    compiled = json.loads((tmp_path / "mine.llmc" / "report" / "compile.json").read_text())
    assert compiled["versions"]["extension mine"] == "1.2 (pass norm-last)"
    assert json.loads((tmp_path / "mine.llmc" / "manifest.json").read_text())["compiler"].endswith(", mine 1.2")
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    text = capsys.readouterr().out
    options = next(line for line in text.splitlines() if line.startswith("  options "))
    assert f"pipeline {pipeline}" in options
    assert "extension mine 1.2 (pass norm-last)" in text
    assert main(["compile", str(model), "-o", str(tmp_path / "plain.llmc"), "--cache", str(cache)]) == 0
    plain = (tmp_path / "plain.llmc" / "report" / "compile.json").read_text()
    assert "extension" not in plain and "mine" not in json.loads(plain)["versions"]


@pytest.mark.parametrize(
    "words, change, code",
    [
        (["--pipeline", "serve, after fuse-norm: fuse-nrom"], None, "E420"),
        (["--weights", "random:x"], None, "E127"),
        ([], lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "E321"),
        ([], lambda folder: cut(folder / "model.safetensors"), "E321"),
        ([], edit_config(intermediate_size=72), "E325"),
        ([], edit_config(vocab_size=321), "E325"),
    ],
    ids=["pass", "weights", "damaged", "truncated", "width", "vocabulary"],
)
def test_cheap_checks_come_before_the_trace(
    words: list[str], change: Break | None, code: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def traced(*args: object) -> None:
        raise AssertionError("it was traced")

    monkeypatch.setattr("llmc.frontend.export.export", traced)
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    if change is not None:
        change(folder)
    assert main(["compile", str(folder), "-o", str(tmp_path / "out"), "--no-cache", *words]) == 1
    assert f"LLMC-{code}: " in capsys.readouterr().err


def cut(path: Path) -> None:
    """Truncate a file, as an interrupted download does."""
    path.write_bytes(path.read_bytes()[:-100])


def test_an_existing_output_is_found_before_a_model_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmc.driver.locate_model", lambda *args: pytest.fail("it was downloaded"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["compile", "owner/name", "-o", str(tmp_path / "out"), "--no-cache"]) == 1
    assert "LLMC-E122: " in capsys.readouterr().err


def test_without_a_tokenizer_the_next_command_works_and_notes_are_kept(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model has none. The second compile is linked from the cache."""
    for name in ("first", "second"):
        assert main(["compile", str(model), "-o", str(tmp_path / name), "--cache", str(cache)]) == 0
        output = capsys.readouterr().err
        assert output.count("note: the folder has no tokenizer.json") == 1
        command = next(line for line in output.splitlines() if line.startswith("next: ")).removeprefix(
            "next: python -c "
        )
        done = subprocess.run([sys.executable, "-c", *shlex.split(command)], capture_output=True, text=True, check=True)
        assert "token_ids=" in done.stdout
    assert "reuse: linked" in output


def test_llmc_run_links_what_llmc_compile_has_compiled(
    model: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fixture has compiled the model with the same options."""
    entry = compiled_for_run(model, {"target": "cpu:native", "dtype": "auto"}, cache, lambda line: None)
    assert (entry / "manifest.json").is_file()
    output = capfd.readouterr().err
    assert "reuse: linked" in output and "trace:" not in output


def test_importing_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys, llmc.cli, llmc.frontend, llmc.frontend.model_folder\n"
        "print(sorted(m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
