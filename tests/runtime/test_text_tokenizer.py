"""The tokenizer wrapper against transformers on the same folders, and on damaged ones."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import textkit
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import as_prompts
from llmc_runtime.text.tokenizer import Tokenizer

TEXTS = (
    "", "Hello world", " leading", "trailing ", "two  spaces", "Größe 東京 🙂", "a<s>b</s>c", "<|user|>hi<|end|>",
    "x <tool_call> y", "naïve x", "line\n\nline", "<extra> more", "▁ x",
)  # fmt: skip

FOLDERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "byte level": (textkit.byte_level, {}, {}),
    "byte level with bos": (lambda: textkit.byte_level(bos=True), {}, {}),
    "add_bos_token beside tokenizer.json has no effect": (textkit.byte_level, {"add_bos_token": True}, {}),
    "add_bos_token false beside a post-processor": (lambda: textkit.byte_level(bos=True), {"add_bos_token": False}, {}),
    "llama 2": (textkit.sentencepiece, {}, {}),
    "gemma": (lambda: textkit.sentencepiece(prefix_space=False), {}, {}),
    "no bos": (lambda: textkit.sentencepiece(bos=False), {}, {}),
    "unigram": (textkit.metaspace, {}, {}),
    "tokens that only the config has": (
        textkit.byte_level,
        {"eos_token": "<|new_end|>", "extra_special_tokens": ["<extra>"], "pad_token": "<pad>"},
        {},
    ),
    "additional_special_tokens": (textkit.byte_level, {"additional_special_tokens": ["<extra>", "<|user|>"]}, {}),
    "added_tokens_decoder": (
        textkit.byte_level,
        {"added_tokens_decoder": {
            "431": {"content": "<extra>", "lstrip": True, "rstrip": False, "normalized": False, "special": True,
                    "single_word": False},
            "429": {"content": "<other>", "lstrip": False, "rstrip": False, "normalized": True, "special": False,
                    "single_word": False},
        }},
        {},
    ),
    "special_tokens_map of an old folder": (
        textkit.byte_level,
        {},
        {"special_tokens_map": {"eos_token": {"content": "<|end|>", "lstrip": False, "rstrip": False,
                                              "normalized": False, "single_word": False}, "unk_token": "<unk>"}},
    ),
    "special tokens are split": (textkit.byte_level, {"split_special_tokens": False}, {}),
    "a named special token that is an ordinary entry": (textkit.byte_level, {"eos_token": "the"}, {}),
}  # fmt: skip


@pytest.fixture(params=FOLDERS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Any]:
    transformers = pytest.importorskip("transformers")
    make, config, files = FOLDERS[request.param]
    folder = textkit.write_folder(tmp_path, make(), config, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return Tokenizer.open(folder), theirs


def test_ids_and_texts_are_those_of_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_names_and_sizes_are_those_of_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token)
    some = [random.randrange(len(theirs)) for _ in range(9)]
    assert ours.convert_ids_to_tokens(some) == theirs.convert_ids_to_tokens(some)
    assert ours.convert_ids_to_tokens(some[0]) == theirs.convert_ids_to_tokens(some[0])
    assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(some)) == some
    assert ours.convert_tokens_to_ids("no such entry") == theirs.convert_tokens_to_ids("no such entry")
    assert dict(ours.named_tokens) == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.special_ids == {i for i, t in theirs.added_tokens_decoder.items() if t.special}


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tok = textkit.byte_level()
    tok.enable_truncation(3)
    tok.enable_padding(length=50)
    ours = Tokenizer.open(textkit.write_folder(tmp_path, tok))
    text = "The kernel of a matrix"
    assert ours.decode(ours.encode(text)) == text


def test_ids_without_an_entry_have_no_text(tmp_path: Path) -> None:
    ours = Tokenizer.open(textkit.write_folder(tmp_path, textkit.byte_level()))
    assert ours.decode([*ours.encode("a"), 50_000]) == "a"
    assert ours.token(50_000) is None


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "E150", "no tokenizer.json"),
        (lambda f: os.truncate(f / "tokenizer.json", 999), "E151", "tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "E151", "tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"a": '), "E151", "tokenizer_config.json"),
        (lambda f: (f / "tokenizer_config.json").write_text("[1]"), "E151", "expected an object"),
        (lambda f: (f / "tokenizer_config.json").write_bytes(b"\xff\xfe{"), "E151", "tokenizer_config.json"),
    ],
)  # fmt: skip
def test_missing_and_corrupt_files_are_named(tmp_path: Path, damage: Any, code: str, words: str) -> None:
    folder = textkit.write_folder(tmp_path, textkit.byte_level())
    damage(folder)
    with pytest.raises(LlmcError) as e:
        Tokenizer.open(folder)
    assert e.value.code == code
    assert words in e.value.cause
    assert e.value.remedy


def test_a_folder_with_another_format_says_which(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(LlmcError, match=r"it has only tokenizer\.model"):
        Tokenizer.open(tmp_path)


def test_an_unpaired_surrogate_is_refused(tmp_path: Path) -> None:
    ours = Tokenizer.open(textkit.write_folder(tmp_path, textkit.byte_level()))
    with pytest.raises(LlmcError) as e:
        ours.encode("a\ud800b")
    assert e.value.code == "E621"


def test_texts_in_batches_are_encoded_as_single_ones() -> None:
    """Also with a text in the middle of a batch that cannot be encoded: the error names its number."""
    tok = Tokenizer(textkit.byte_level(bos=True), {}, {})
    draw = random.Random(5)
    texts = ["".join(chr(draw.choice((32, 97, 228, 0x4E2D, 0x1F600))) for _ in range(i % 40)) for i in range(700)]
    assert [prompt.ids for prompt in as_prompts(texts, tok)] == [tok.encode(text) for text in texts]
    pairs = list(zip(texts, texts[::-1]))
    assert list(tok.encode_pairs(pairs, 1000)) == [tok.encode_pair(a, b, 1000) for a, b in pairs]
    texts[300] = "\ud800"
    with pytest.raises(LlmcError, match=r"E621.*prompt 300 of 700.*surrogates"):
        as_prompts(texts, tok)
    assert as_prompts([], tok) == []


def test_entries_of_ids_are_looked_up_once() -> None:
    backend = textkit.byte_level()
    asked: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def id_to_token(self, token: int) -> str | None:
            asked.append(token)
            return backend.id_to_token(token)

    tokenizer = Tokenizer(Counting(), {}, {})  # type: ignore[arg-type]
    beyond = tokenizer.vocab_size + 7
    ids = [5, 3, 5, beyond, 3]
    for _ in range(3):
        assert tokenizer.tokens(ids) == [backend.id_to_token(i) for i in ids] and tokenizer.tokens([beyond]) == [None]
    assert sorted(asked) == [3, 5, beyond]
