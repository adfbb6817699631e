"""Tokenizing with a bound: the same ids for what fits, a refusal by a prefix or by length for what cannot."""

from __future__ import annotations

import pytest
import textkit

pytest.importorskip("starlette")
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.prompting import Prompting
from llmc_runtime.server.requests.request_fields import CompletionRequest
from llmc_runtime.text.bounded_encode import TooLong, encode_bounded, longest_token
from llmc_runtime.text.tokenizer import Tokenizer
from tokenizers import AddedToken, normalizers

TEXT = " ".join(textkit.CORPUS)


def tokenizer(backend: object) -> Tokenizer:
    return Tokenizer(backend, {}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [textkit.byte_level, textkit.sentencepiece, textkit.metaspace])
@pytest.mark.parametrize("special", [True, False])
def test_accepted_texts_have_the_ids_of_the_whole_text(make: object, special: bool) -> None:
    tok = tokenizer(make())  # type: ignore[operator]
    text = TEXT * 40
    whole = tok.encode(text, add_special_tokens=special)
    for most in (len(whole), len(whole) // 2, 100, 10):
        try:
            assert encode_bounded(tok, text, most, add_special_tokens=special) == whole
        except TooLong as e:
            assert len(whole) > most and e.code == "E602" and str(most) in e.cause


def test_a_text_that_is_far_too_long_is_not_tokenized_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    tok, seen = tokenizer(textkit.byte_level()), list[int]()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **more: bool) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with pytest.raises(TooLong):
        encode_bounded(tok, TEXT * 1000, 100)
    assert seen and max(seen) < 20_000
    seen.clear()
    with pytest.raises(TooLong):
        encode_bounded(tok, TEXT * 1000, 100, longest=longest_token(tok))
    assert not seen


def test_texts_that_shrink_are_not_refused_by_their_length() -> None:
    plain = textkit.byte_level()
    longest = longest_token(tokenizer(plain))
    assert longest == max(len(token.encode()) for token in plain.get_vocab())
    plain.normalizer = normalizers.Replace("zzz", "")
    assert longest_token(tokenizer(plain)) is None
    tok = tokenizer(plain)
    assert encode_bounded(tok, "zzz" * 100_000, 10) == []
    greedy = textkit.byte_level()
    greedy.add_special_tokens([AddedToken("<|wide|>", lstrip=True, special=True)])
    assert longest_token(tokenizer(greedy)) is None
    assert longest_token(tokenizer(textkit.sentencepiece())) is None


def test_a_refusal_states_the_longest_prompt_that_fits() -> None:
    """A model that pools takes prompts of the whole context; one that generates needs room for a token of output."""
    tok, text = tokenizer(textkit.byte_level()), TEXT * 1000
    prompting = Prompting(tok, 1000, None, 100)
    with pytest.raises(TooLong, match="shorten the prompt to 100 tokens"):
        prompting.check_length(text)
    with pytest.raises(ApiError, match="shorten the prompt to 99 tokens"):
        list(prompting.completion(CompletionRequest(prompt=text)))
