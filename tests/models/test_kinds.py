"""Inputs that cannot be compiled are refused before tracing, each with a specific error and a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.text.chat_template import ChatTemplate
from models.cases import SMALL
from models.kit import fails
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmc.cli import main
from llmc.diagnostics import Diagnostic
from llmc.driver import compile_model
from llmc.frontend.model_folder import open_source
from llmc.frontend.tokenizer_files import check_tokenizer, unusable_templates, without_embedding, without_tokenizer
from llmc.options import Options


def config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.gguf", "a GGUF file"),
        ("model.onnx", "an ONNX file"),
        ("pytorch_model.bin", "a pickle"),
        ("model.safetensors", "folder that contains it"),
        ("config.json", "folder that contains it"),
    ],
)
def test_a_file_is_named_by_what_it_is(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    fails("E301", name, words, do=lambda: open_source(tmp_path / name))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.gguf", "README.md"], "GGUF"),
        (["model.onnx"], "ONNX"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter"),
        (["model_index.json"], "diffusers"),
        (["params.json", "consolidated.00.pth"], "publisher"),
        (["manifest.json"], "llmc-run"),
        (["consolidated.pth"], "a pickle"),
    ],
)
def test_a_folder_without_a_config_is_named_by_what_it_holds(names: list[str], words: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    fails("E302", words, do=lambda: open_source(tmp_path))


def test_an_adapter_beside_a_config(tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    fails("E302", "someone/base", "merge_and_unload", do=lambda: open_source(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model-00001-of-00002.bin", "pickled weights only"),
        ("model.q4.gguf", "GGUF"),
        ("model.onnx", "ONNX"),
        ("tf_model.h5", "TensorFlow"),
        ("adapter_model.safetensors", "adapter"),
        ("weights.safetensors", "rename it to model.safetensors"),
        ("model-00001-of-00003.safetensors", "2 are missing: model-00002-of-00003.safetensors"),
        ("shard-00001-of-00001.safetensors", "download model.safetensors.index.json"),
        ("consolidated.safetensors", "publisher's own layout"),
    ],
)
def test_weights_of_another_form_are_reported_before_the_trace(name: str, words: str, tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(Diagnostic, match=words) as e:
        compile_model(tmp_path, tmp_path / "out", Options())
    assert e.value.code in ("E320", "E302") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "code"), [("model.safetensors", "E320"), ("tokenizer.json", "E308")])
def test_a_pointer_of_git_lfs_is_named(name: str, code: str, tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    fails(
        code,
        name,
        "pointer of Git LFS",
        "git lfs pull",
        do=lambda: compile_model(tmp_path, tmp_path / "out", Options()),
    )


def test_the_command_line_refuses_code_and_asks_the_given_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path)
    out = ["-o", str(tmp_path / "out.llmc")]
    assert main(["compile", str(tmp_path), *out, "--trust-remote-code"]) == 1
    assert "LLMC-E304: --trust-remote-code" in capsys.readouterr().err
    nowhere = ["--hub-endpoint", "http://127.0.0.1:9", "--download-dir", str(tmp_path / "hub")]
    assert main(["compile", "someone/tiny@v1", *out, *nowhere]) == 3
    assert "http://127.0.0.1:9 does not respond for someone/tiny@v1" in capsys.readouterr().err
    assert main(["pack", str(tmp_path), "someone/tiny", "--offline", *nowhere]) in (1, 3)


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ('{"target": 1}\n', "line 1, is not a record")])
def test_bad_measurements_are_reported_before_the_trace(text: str | None, words: str, tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged, which nobody looks at yet")
    if text:
        (tmp_path / "tuning.jsonl").write_text(text)
    options = Options(tuning=tmp_path / "tuning.jsonl", cache=tmp_path / "cache")
    fails("E432", "tuning.jsonl", words, do=lambda: compile_model(tmp_path, tmp_path / "out", options))


@pytest.mark.parametrize("form", ["", "tokenizer.model", "tekken.json"])
def test_a_folder_without_a_tokenizer_says_what_it_takes(form: str, tmp_path: Path) -> None:
    if form:
        (tmp_path / form).write_bytes(b"")
    result = without_tokenizer(tmp_path)
    assert "token ids" in result and form in result and ("save_pretrained" in result) == bool(form)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert without_tokenizer(tmp_path) == ""


def test_templates_that_chats_cannot_use_are_noted(tmp_path: Path) -> None:
    """The note has the error that chats get. A template that fails for some messages only is not noted."""
    assert list(unusable_templates(tmp_path)) == []
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for m in messages %}{{ m.content }"}')
    (note,) = unusable_templates(tmp_path)
    assert note.startswith("the chat template has a syntax error in line 1: ") and "--chat-template" in note
    with pytest.raises(LlmcError, match="syntax error in line 1"):
        ChatTemplate("{% for m in messages %}{{ m.content }", {})
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{% if tools %}")
    (note,) = unusable_templates(tmp_path)
    assert " (tools): chats with it are refused" in note


def test_tokens_without_an_embedding_are_counted(tmp_path: Path) -> None:
    tokens = {"a": 0, "b": 1, "<|x|>": 2, "<|y|>": 3}
    Tokenizer(WordLevel(tokens, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = check_tokenizer(tmp_path)
    assert "2 tokens of tokenizer.json from id 2 ('<|x|>') on" in without_embedding(tokenizer, 2)
    assert "1 token of tokenizer.json from id 3" in without_embedding(tokenizer, 3)
    assert without_embedding(tokenizer, 4) == without_embedding(None, 0) == ""
