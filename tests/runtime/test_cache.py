"""The cache of compiled models: the inputs that an entry depends on, and the clean-up after failed or killed builds."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import LLM, LlmcError, compile_cache
from llmc_runtime.api.llm import resolve
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format import cache_key
from llmc_runtime.format.names import is_artifact

OPTIONS = {"target": "cpu:x86-64-v3", "dtype": "auto"}
FAKE = (
    "import sys, os, pathlib; out = pathlib.Path(sys.argv[2]); out.mkdir();"
    "print('working', file=sys.stderr); print('hidden');"
    "(out / 'weights').write_text('w'); open(sys.argv[3], 'a').write('x');"
    "(out / 'manifest.json').write_text('{}')"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "README.md").write_text("read me")
    return folder


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes two files; the file answered here has one byte for each time it ran."""
    count = tmp_path / "count"
    count.write_text("")

    def command(source: Path, output: Path, options: Any, root: Path) -> list[str]:
        return ["-c", FAKE, str(source), str(output), str(count)]

    monkeypatch.setattr(compile_cache, "compile_command", command)
    monkeypatch.setattr(compile_cache, "require_compiler", lambda *why: None)
    return count


def build(model: Path, root: Path, said: list[str] | None = None, **options: str) -> Path:
    return compile_cache.compiled(model, OPTIONS | options, root, (said if said is not None else []).append)


def test_the_second_time_nothing_is_built_and_both_are_said(
    model: Path, builds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[str] = []
    first = build(model, tmp_path / "root", messages)
    assert (first / "weights").read_text() == "w"
    assert "is not compiled yet" in messages[0]
    assert "the same as a command: llmc compile" in messages[1]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "working\n"
    assert build(model, tmp_path / "root", messages) == first
    assert messages[-1].startswith("using ")
    assert builds.read_text() == "x"


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("owner/name", True), ("owner/name-1.5_x@v1/2", True), ("owner/na..me", False), ("./owner/name", False),
        ("/owner/name", False), ("owner/name/more", False), ("name", False), ("owner/name.llmc", False),
        ("there/name", False), ("owner/name\n", False), ("owner/--flag", False),
    ],
)  # fmt: skip
def test_ids_of_the_hub_and_paths_are_distinguished(
    text: str, id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert compile_cache.is_id(text) is id


def test_a_hubs_model_is_fetched_by_the_compiler(builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[list[str]] = []
    fake = FAKE.replace("out.mkdir()", "out.mkdir(exist_ok=True)")
    real = compile_cache.fetch_command

    def command(name: str, output: Path, options: Any, root: Path) -> list[str]:
        requests.append(real(name, output, options, root))
        return ["-c", fake, name, str(output), str(builds)]

    monkeypatch.setattr(compile_cache, "fetch_command", command)
    monkeypatch.setattr(compile_cache, "require_compiler", lambda *why: None)
    messages: list[str] = []
    found = [resolve(name, OPTIONS, tmp_path / "root", messages.append) for name in ("o/n@v1", "o/n@v1", "o/n")]
    assert found[0] == found[1] != found[2] and found[0].name.startswith("o--n-v1-")
    assert builds.read_text() == "xxx"  # the compiler knows what it has
    assert requests[0][3:6] == ["compile", "o/n@v1", "-o"] and {"--force", "--cache"} <= set(requests[0])
    assert "model of a hub" in messages[0] and "llmc compile o/n@v1 -o model.llmc --target" in messages[1]
    monkeypatch.setattr(
        compile_cache, "fetch_command", lambda *a: ["-c", "import sys; sys.exit('LLMC-E330: nothing there')"]
    )
    with pytest.raises(LlmcError) as error:
        resolve("o/typo", OPTIONS, tmp_path / "root", messages.append)
    assert error.value.code == "E641" and "E330" in error.value.cause


def test_options_that_change_the_key(model: Path, tmp_path: Path) -> None:
    def key(folder: Path = model, **options: str) -> str:
        return cache_key.artifact_key(folder, OPTIONS | options, tmp_path)

    first = key()
    (model / "README.md").write_text("another")
    os.utime(model / "config.json")
    assert key() == first
    assert key(shutil.copytree(model, tmp_path / "elsewhere")) == first
    found = {first, key(dtype="float32"), key(target="cpu:native"), key(**{"max-model-len": "5"})}
    (model / "additional_chat_templates" / "rag.jinja").write_text("x")
    found.add(key())
    (model / "model.safetensors").write_bytes(b"weightz" * 1000)
    found.add(key())
    (model / "generation_config.json").write_text("{}")
    found.add(key())
    assert len(found) == 7


def test_another_compiler_is_another_key(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache_key.artifact_key(model, OPTIONS, tmp_path)
    package = tmp_path / "llmc"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llmc", raising=False)
    one = cache_key.artifact_key(model, OPTIONS, tmp_path)
    (package / "__init__.py").write_text("x = 1")
    assert len({first, one, cache_key.artifact_key(model, OPTIONS, tmp_path)}) == 3


def test_unchanged_files_are_hashed_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = cache_key._file_hash
    monkeypatch.setattr(cache_key, "_file_hash", lambda p: hashed.append(p.name) or real(p))
    first = cache_key.source_hashes(model, tmp_path)
    assert cache_key.source_hashes(model, tmp_path) == first
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    (tmp_path / "hashes.json").write_text("[damaged")
    assert cache_key.source_hashes(model, tmp_path) == first
    assert len(hashed) == 4


def test_waiting_for_another_build_is_reported(model: Path, builds: Path, tmp_path: Path) -> None:
    entry = build(model, tmp_path / "root")
    shutil.rmtree(entry)
    messages: list[str] = []

    def say(line: str) -> None:
        messages.append(line)
        fcntl.flock(held, fcntl.LOCK_UN)

    with open(entry.parent / f".{entry.name}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compile_cache.compiled(model, OPTIONS, tmp_path / "root", say) == entry
    assert "another process is compiling this model" in messages[0]


def test_two_at_once_build_once(model: Path, builds: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(model, tmp_path / "root"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert builds.read_text() == "x"


def test_a_failed_build_leaves_nothing_and_says_what_the_compiler_said(
    model: Path, builds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, sys; os.mkdir(sys.argv[1]); print('LLMC-E301: unknown architecture', file=sys.stderr); sys.exit(1)"
    )
    with monkeypatch.context() as m:
        m.setattr(compile_cache, "compile_command", lambda s, out, o, r: ["-c", script, str(out)])
        with pytest.raises(LlmcError, match="exit code 1: LLMC-E301: unknown architecture") as e:
            build(model, tmp_path / "root")
        assert e.value.code == "E641"
    left = [p.name for p in (tmp_path / "root" / "artifacts").iterdir() if not p.name.endswith(".lock")]
    assert left == []
    assert is_artifact(build(model, tmp_path / "root"))


def test_files_of_a_killed_build_are_removed(model: Path, builds: Path, tmp_path: Path) -> None:
    entry = build(model, tmp_path / "root")
    stale = entry.parent / f".{entry.name}.12345.tmp"
    stale.mkdir()
    (stale / "half").write_text("x")
    shutil.rmtree(entry)
    entry.mkdir()  # an entry without its manifest is none
    assert build(model, tmp_path / "root") == entry
    assert not stale.exists()
    assert builds.read_text() == "xx"


def test_without_the_compiler_the_error_names_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(LlmcError) as e:
        LLM(model, cache_dir=tmp_path / "root", say=lambda line: None)
    assert e.value.code == "E640"
    assert "torch missing" in e.value.cause
    assert "pip install" in e.value.remedy and "[compile]'" in e.value.remedy


def test_a_cache_that_cannot_be_written_is_named(model: Path, builds: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmcError) as e:
        build(model, tmp_path / "file" / "root")
    assert e.value.code == "E642"


def test_the_command_is_one_that_the_compiler_understands(tmp_path: Path) -> None:
    from llmc.cli import _parser

    chosen = EngineOptions("m", deterministic=True, target="cpu:x86-64-v3", max_model_len=64, max_num_seqs=4)
    options = OPTIONS | chosen.compile_options | {"max-num-batched-tokens": "32"}
    command = compile_cache.compile_command(tmp_path / "m", tmp_path / "out", options, tmp_path / "root")
    assert command[:3] == ["-P", "-m", "llmc.cli"]
    args = _parser().parse_args(command[3:])
    assert (args.target, args.max_model_len, args.max_num_seqs) == ("cpu:x86-64-v3", 64, 4)
    assert args.cache == tmp_path / "root" and args.deterministic


@pytest.mark.parametrize(
    ("speculate", "draft"),
    [
        ("ngram:3", None),
        ("eagle:3", None),
        ("mtp", "mtp"),
        ({"method": "deepseek_mtp", "model": "m", "num_speculative_tokens": 1}, "mtp"),
        ({"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}, "eagle:owner/head"),
        ({"method": "draft_model", "model": "owner/small", "num_speculative_tokens": 3}, "owner/small"),
        ({"model": "owner/small"}, "owner/small"),
    ],
)
def test_what_drafts_is_compiled_with_the_model(speculate: Any, draft: str | None) -> None:
    """vLLM's key `model` names it, as for a server that is given a model instead of an artifact."""
    options = EngineOptions("m", speculate=speculate).compile_options
    assert options.get("draft") == draft and int(options["speculate"]) >= 1


def test_another_head_is_another_entry(model: Path, builds: Path, tmp_path: Path) -> None:
    """The key covers the files of what drafts, not only its name."""
    head = tmp_path / "head"
    head.mkdir()
    options, found = OPTIONS | {"draft": f"eagle:{head}"}, set()
    for text in ("{}", '{"a": 1}'):
        (head / "config.json").write_text(text)
        found.add(compile_cache.compiled(model, options, tmp_path / "root", lambda line: None))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Path.home() / ".cache" / "llmc"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/llmc")),
        ({"XDG_CACHE_HOME": "/x", "LLMC_CACHE": "/y"}, Path("/y")),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], expected: Path) -> None:
    assert compile_cache.default_root(environ) == expected


def test_other_names_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(LlmcError) as e:
            resolve(path, {}, tmp_path, lambda line: None)
        assert e.value.code == "E101"


def test_the_module_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); from llmc_runtime import compile_cache\n"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    env = {"PYTHONPATH": str(Path(compile_cache.__file__).parents[1]), "PATH": os.defpath}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "['llmc_runtime']"
