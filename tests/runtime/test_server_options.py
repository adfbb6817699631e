"""Options of llmc-serve: flags, a YAML file, vLLM's spellings, and the error for each mistake."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime.cli import main_serve
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.ignored_options import IGNORED, REFUSED, check_ignored
from llmc_runtime.server.config import options_of, read

DOCS = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"


def config(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_a_flag_comes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    port, rows = random.randrange(2000, 9000), random.randrange(1, 99)
    file = config(
        tmp_path,
        f"model: from-file\nport: {port}\nmax_num_seqs: {rows}\nkv-cache-memory-bytes: 2GiB\n"
        "served-model-name: [a, b]\nenable-prefix-caching: false\nallowed-hosts: one\n",
    )
    given = read(["--config", file, "--port", "77", "from-flag"])
    args = given.args
    assert (args.model, args.port, args.max_num_seqs, args.seed) == ("from-flag", 77, rows, 0)
    assert (args.kv_cache_memory_bytes, args.served_model_name, args.allowed_hosts) == (2 << 30, ["a", "b"], ["one"])
    assert args.enable_prefix_caching is False
    assert [given.sources[n] for n in ("model", "port", "max_num_seqs", "seed")] == ["flag", "flag", file, "default"]
    assert read(["--config", file, "--enable-prefix-caching"]).args.enable_prefix_caching is True
    assert read(["--config", file]).args.port == port
    options = options_of(args, {}, None)
    assert options.engine["max_num_seqs"] == rows and options.names == ["a", "b"] and options.tls is None


def test_printed_options_are_a_file_with_the_same_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["m.llmc", "--served-model-name", "x", 'y"#: z', "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    assert main_serve([*words, "--print-config"]) == 0
    text = capsys.readouterr().out
    file = config(tmp_path, text)
    assert vars(read(["--config", file]).args) | {"config": None} == vars(read(words).args)
    assert main_serve([*words, "--print-config", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["max-num-seqs"] == {"value": 3, "source": "flag"}
    assert output["port"] == {"value": 8000, "source": "default"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8000", "did you mean port"),
        ("port: many", "port: 'many' is not a port"),
        ("port: true", "text or a number"),
        ("port: [1, 2]", "not a list"),
        ("port:", "text or a number"),
        ("port: {a: 1}", "text or a number"),
        ("served-model-name: [[a]]", "text or a number"),
        ("enable-prefix-caching: 1", "true or false"),
        ("no-enable-prefix-caching: true", "unknown option"),
        ("scheduling-policy: lifo", "scheduling-policy: invalid choice"),
        ("port: 1\nport: 2", "twice"),
        ("- a\n- b", "not a mapping"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("config: other.yaml", "unknown option"),
        ("", "not a mapping"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(LlmcError) as error:
        read(["m", "--config", config(tmp_path, text)])
    assert error.value.code == "E648" and words in error.value.cause and "serve.yaml" in error.value.cause


def test_a_file_that_is_not_there_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_serve(["m", "--config", str(tmp_path / "no.yaml")]) == 1
    error = capsys.readouterr().err
    assert "E648" in error and "no.yaml cannot be read: No such file or directory\n" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--prot", "8"], "did you mean --port?"),
        (["m", "--max-num-seq=8"], "did you mean --max-num-seqs?"),
        (["m", "--zzz"], "--help lists all"),
        ([], "the model is missing"),
        (["m", "--port", "x"], "--port"),
        (["m", "--max-num-seqs", "0"], "at least 1"),
        (["m", "--max-model-len", "1.5"], "at least 1"),
        (["m", "--max-model-len", "1.0001k"], "at least 1"),
        (["m", "--max-model-len=-1k"], "at least 1"),
        (["m", "--max-model-len", "infk"], "at least 1"),
        (["m", "--port", "65536"], "0 to 65535"),
        (["m", "--port", "-1"], "0 to 65535"),
        (["m", "--override-generation-config", "{'top_p': 1}"], "\"{'top_p': 1}\" is not a JSON object"),
        (["--model", "m"], "without a flag"),
    ],
)
def test_wrong_usage_ends_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main_serve(words)
    assert end.value.code == 2 and said in capsys.readouterr().err


def flag_words(row: Any, flag: str, value: str) -> list[str]:
    return ["m", flag] if row.values == "" else ["m", flag, value]


@pytest.mark.parametrize("row", IGNORED, ids=lambda row: row.flags[0])
def test_vllm_flags_without_meaning_are_ignored_with_a_line(row: Any) -> None:
    for flag in row.flags:
        (line,) = check_ignored(read(flag_words(row, flag, "7")).args.ignored_flags)
        assert line.startswith(flag) and "is ignored" in line


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.flags[0])
def test_vllm_flags_that_would_change_answers_are_refused(row: Any) -> None:
    for flag in row.flags:
        with pytest.raises(LlmcError) as error:
            check_ignored(read(flag_words(row, flag, "secret-77")).args.ignored_flags)
        assert error.value.code == "E648" and error.value.remedy
        assert ("secret" in error.value.cause) == (bool(row.values) and flag != "--api-key")
        for value in row.harmless:
            assert len(check_ignored(read(flag_words(row, flag, value)).args.ignored_flags)) == 1


def test_switches_that_are_off_are_ignored() -> None:
    words = ["m", "--no-enforce-eager", "--no-enable-lora", "--no-trust-remote-code", "--no-async-scheduling"]
    lines = check_ignored(read(words).args.ignored_flags)
    assert [line.split(" is ignored")[0] for line in lines] == words[1:]


def test_keys_of_an_object_may_be_flags() -> None:
    words = ["m", "--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=3"]
    words += ["--limit-mm-per-prompt.image", "2", "--compilation-config.pass_config.enable_fusion", "true"]
    words += ["-cc.mode", "3"]
    args = read([*words, "--structured-outputs-config.backend", "xgrammar"]).args
    assert args.speculate == {"method": "ngram", "num_speculative_tokens": 3}
    assert [values for _, values in args.ignored_flags] == [
        ['{"image": 2}'], ['{"pass_config": {"enable_fusion": true}}'], ['{"mode": 3}'], ['{"backend": "xgrammar"}'],
    ]  # fmt: skip
    assert len(check_ignored(args.ignored_flags)) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf-overrides.a", "1", "--hf-overrides", "{}"], "--hf-overrides is given as a whole and by its keys"),
        (["--hf-overrides.a", "1", "--hf-overrides.a", "2"], "--hf-overrides.a is given twice"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "--hf-overrides.a.b contradicts an earlier flag"),
        (["--hf-overrides.a"], "--hf-overrides.a needs a value"),
        (["--hf-overrides.a", "--port", "1"], "--hf-overrides.a needs a value"),
        (["--port.x", "1"], "unknown option --port.x"),
        (["--no-enable-lora.x", "1"], "unknown option --no-enable-lora.x"),
    ],
)
def test_contradicting_keys_end_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read(["m", *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_they_may_stand_in_the_file_too(tmp_path: Path) -> None:
    file = config(tmp_path, "enforce_eager: true\nasync-scheduling: false\nswap-space: 4\n")
    lines = check_ignored(read(["m", "--config", file]).args.ignored_flags)
    assert [line.split()[0] for line in lines] == ["--enforce-eager", "--swap-space"]
    file = config(tmp_path, "pipeline-parallel-size: 2\n")
    with pytest.raises(LlmcError):
        check_ignored(read(["m", "--config", file]).args.ignored_flags)


@pytest.mark.parametrize(
    ("text", "tokens"), [("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2 << 20), ("77", 77)]
)
def test_tokens_may_have_a_unit(text: str, tokens: int, tmp_path: Path) -> None:
    args = read(["m", "--max-model-len", text, "--config", config(tmp_path, f"max-num-batched-tokens: {text}")]).args
    assert args.max_model_len == args.max_num_batched_tokens == tokens


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_the_longest_sequence_may_be_named(text: str, tmp_path: Path) -> None:
    assert read(["m", "--max-model-len", text]).args.max_model_len is None
    assert read(["m", "--config", config(tmp_path, f"max-model-len: {text}")]).args.max_model_len is None
    assert EngineOptions("m", max_model_len=text).max_model_len is None  # type: ignore[arg-type]


def test_underscores_are_dashes() -> None:
    assert read(["m_x", "--max_num_seqs", "4", "--served_model_name=a_b"]).args.served_model_name == ["a_b"]
    assert read(["m_x", "--max_num_seqs", "4"]).args.model == "m_x"


def test_the_page_lists_them() -> None:
    text = DOCS.read_text()
    listed = set(re.findall(r"--?[A-Za-z][\w-]*", text))
    assert not {flag for row in (*IGNORED, *REFUSED) for flag in row.flags if flag not in listed}


@pytest.mark.parametrize("name", ("", "x" * 257))
def test_names_that_no_request_can_have_are_refused(name: str, tmp_path: Path) -> None:
    words = ["m", "--config", config(tmp_path, f"port: 0\nserved-model-name: [a, '{name}']\n")]
    with pytest.raises(LlmcError, match=r"E201.*served-model-name") as error:
        options_of(read(words).args, {}, None)
    assert "1 to 256 characters" in error.value.remedy


def test_variables_of_the_template_are_named_and_checked() -> None:
    given = {"enable_thinking": False, "level": 2}
    words = ["m", "--default-chat-template-kwargs", json.dumps(given)]
    assert options_of(read(words).args, {}, None).default_chat_template_kwargs == given
    for name in ("messages", "add_generation_prompt", "not a name"):
        with pytest.raises(LlmcError, match=f"E648.*'{name}' cannot be set"):
            options_of(read([*words[:2], json.dumps({name: 1})]).args, {}, None)


def test_options_in_json_may_be_mappings_of_the_file(tmp_path: Path) -> None:
    drafts, sampling = {"method": "ngram", "num_speculative_tokens": 3}, {"temperature": 0.5}
    nested = "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n"
    text = nested + "override-generation-config: {temperature: 0.5}\n"
    file = read(["m", "--config", config(tmp_path, text)]).args
    flags = ["--speculative-config", json.dumps(drafts), "--override-generation-config", json.dumps(sampling)]
    given = read(["m", *flags]).args
    assert file.speculate == given.speculate == drafts
    assert file.override_generation_config == given.override_generation_config == sampling
