"""All commands parse alike: no abbreviations, and the nearest name for a misspelt flag, value, command or op."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from llmc_runtime.command_parser import CommandParser
from llmc_runtime.format.nearest import did_you_mean, nearest

from llmc.cli import main
from llmc.options import Options
from llmc.quant.make.plan import Settings


@pytest.mark.parametrize(
    "words, said",
    [
        ("compil", "did you mean compile?"),
        ("help compil", "did you mean compile?"),
        ("passes --jsn", "did you mean --json?"),
        ("compile m --targt x", "did you mean --target?"),
        ("compile m --quant itn4", "did you mean int4?"),
        ("run m --max-token 3", "did you mean --max-tokens?"),
        ("run m --temp 3", "unrecognized arguments: --temp"),
        ("inspect m --kern 3", "unrecognized arguments: --kern"),
        ("bench latncy", "did you mean latency?"),
        ("bench offline m --num-promts 3", "did you mean --num-prompts?"),
        ("collect-env --jsn", "did you mean --json?"),
        ("serve m --max-model-length 3", "did you mean --max-model-len?"),
        ("-v compile m", "llmc compile: error: unrecognized arguments: -v: options of a command follow it"),
        ("compile m --binds T=1", "llmc compile: error: unrecognized arguments: --binds T=1\n"),
        ("compile m -p fuse-norm", "llmc compile: error: unrecognized arguments: -p fuse-norm\n"),
        ("bench latency m --goodputt 3", "llmc bench latency: error: unrecognized arguments: --goodputt 3\n"),
    ],
)
def test_misspelt_words_end_with_2_and_the_nearest(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(words.split()))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "{} model out --quant int8",
        "{} model --scheme int8 out",
        "{} --quant int8 model -o out",
        "{} model --output out --scheme=int8",
    ],
)
@pytest.mark.parametrize("command", ["compile", "quantize"])
def test_compile_and_quantize_spell_output_and_recipe_alike(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands read the same output and recipe from either spelling."""
    seen: list[tuple[str, str]] = []

    def compiled(model: str, output: Path, options: Options, *rest: object) -> NoReturn:
        seen.append((str(output), options.quant))
        raise KeyboardInterrupt

    def quantised(model: str, output: Path, settings: Settings, *rest: object) -> NoReturn:
        seen.append((str(output), settings.scheme))
        raise KeyboardInterrupt

    monkeypatch.setattr("llmc.driver.compile_model", compiled)
    monkeypatch.setattr("llmc.quant.make.quantize_model.quantize_model", quantised)
    assert main(words.format(command).split()) == 130
    assert seen == [("out", "int8")]


@pytest.mark.parametrize("command", ["compile", "quantize"])
@pytest.mark.parametrize(
    ("words", "message"), [("a -o b", "given twice, as a and as -o b"), ("", "with -o"), ("a b", "arguments: b")]
)
def test_an_output_is_given_once(command: str, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "model", *words.split(), "--quant", "int8"])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_suggestions_are_whole_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help wraps lines after a hyphen; a part of a flag is not suggested."""
    monkeypatch.setenv("COLUMNS", "80")
    parser = CommandParser("x")
    parser.add_argument("--no-verify", help="check hashes at startup, unless switched off (--no-verify: do not check)")
    assert parser.flags() == ["--help", "--no-verify", "-h"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("ops nrom", "'rms_norm'"),
        ("ops linaer", "'linear'"),
        ("opt nothing.llir -p fuse-nrom --target cuda:sm90", "'cuda:sm_90'"),
    ],
)
def test_misspelt_names_end_with_1(words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    argv = [f"{tmp_path}/nothing.llir" if w == "nothing.llir" else w for w in words.split()]
    with open(f"{tmp_path}/nothing.llir", "w") as file:
        file.write("graph @main(%x: f32[4]) {\n  return %x\n}\n")
    assert main(argv) == 1
    assert f"did you mean {said}" in capsys.readouterr().err


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["help"], ["help", "compile"], ["help", "run"]):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0
        assert f"usage: llmc{' ' * (len(argv) > 1)}{' '.join(argv[1:])}" in capsys.readouterr().out


def test_a_size_of_the_kv_cache_is_spelled_alike() -> None:
    from llmc.cli import _parser

    for flag in ("--kv-cache-memory", "--kv-cache-memory-bytes"):
        assert _parser().parse_args(["inspect", "m", flag, "2GiB"]).kv_cache_memory == 2 << 30


def test_names_that_are_like_nothing_get_the_list() -> None:
    assert nearest("zzzzqqqq", ["compile", "run"]) == []
    assert did_you_mean("zzzzqqqq", ["compile"], "see the list") == "see the list"
    assert did_you_mean("compil", ["compile", "run"], "") == "did you mean 'compile'?"
