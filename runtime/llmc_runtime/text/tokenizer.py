"""A model's tokenizer files, opened with the `tokenizers` library.

The files are those of the Hugging Face folder, unmodified. They are interpreted as in transformers 5: only
`tokenizer.json` decides which special tokens surround a text (its post-processor; `add_bos_token` has no effect), while
`tokenizer_config.json` and `special_tokens_map.json` name special tokens and may add missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.format import tokenizer_files as files
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import TOKENIZER_FILE
from llmc_runtime.text.chat_template import ChatTemplate, Message, choose_template, read_templates
from llmc_runtime.text.json_file import corrupt, read_json, reason_of

if TYPE_CHECKING:
    import tokenizers

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TEMPLATES = 32  # compiled chat templates that are kept
# Keywords of transformers' apply_chat_template that are not variables of a template, and what to use instead.
_ELSEWHERE: Mapping[str, str] = MappingProxyType({
    "return_tensors": "ids are a list", "return_dict": "ids are a list", "padding": "ids are a list",
    "truncation": "shorten the list of ids", "max_length": "shorten the list of ids",
    "return_assistant_tokens_mask": "ids are a list", "tokenizer_kwargs": "render a text, and encode it",
})  # fmt: skip
_BATCH_TEXTS = 256  # texts that are encoded together; their encodings are in memory at a time
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """Encodes text to ids and decodes ids to text, as transformers does for the same folder."""

    def __init__(self, backend: tokenizers.Tokenizer, names: Mapping[str, str], templates: Mapping[str, str]) -> None:
        self.backend = backend
        self.named_tokens: Mapping[str, str] = MappingProxyType(dict(names))
        self.chat_templates: Mapping[str, str] = MappingProxyType(dict(templates))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._templates: dict[str, ChatTemplate] = {}  # by text
        self.decoder_kinds: tuple[str, ...] | None = None  # the types of the decoder's steps, see detokenizer
        self._token_texts: dict[int, str] = {}
        self._entries: dict[int, str | None] = {}  # vocabulary entries by id, those that were needed so far
        self.pieces: dict[int, tuple[bytes, str | None]] = {}  # cache of the detokenizers, see detokenizer
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def open(cls, folder: str | Path) -> Tokenizer:
        """Open the tokenizer files of `folder`. Raises LlmcError E150 (missing) or E151 (corrupt), naming the file."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json", {})
        names = _special_names(folder, config)
        backend = _backend(folder)
        try:
            _add_missing_tokens(backend, config, names)
        except (TypeError, ValueError, OverflowError) as e:
            raise corrupt(folder / "tokenizer_config.json", e) from e
        texts = {name: _content(value) for name, value in names.items() if name.endswith("_token")}
        named_tokens = {name: text for name, text in texts.items() if text}
        return cls(backend, named_tokens, read_templates(folder, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens that the post-processor adds (usually bos).

        Raises LlmcError E621 if the text is not valid Unicode or the tokenizer fails.
        """
        return list(self._encoded(text, add_special_tokens).ids)

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the ids of each text as `encode` does; the library encodes a batch of texts on all CPUs."""
        for encoding in self._all(texts, add_special_tokens):
            yield list(encoding.ids)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], segment: int = 0) -> Iterator[list[int]]:
        """Yield the ids of each pair as `encode_pair` does, a batch at a time."""
        for encoding in self._all(pairs):
            yield [i + segment * kind for i, kind in zip(encoding.ids, encoding.type_ids)]

    def _all(self, texts: Sequence[str] | Sequence[tuple[str, str]], special: bool = True) -> Iterator[Any]:
        """Yield the encodings of texts, or of pairs of texts, in batches."""
        for start in range(0, len(texts), _BATCH_TEXTS):
            part: list[Any] = list(texts[start : start + _BATCH_TEXTS])
            encodings: Iterable[Any]
            try:
                encodings = self.backend.encode_batch_fast(part, add_special_tokens=special)
            except BaseException as e:
                if not isinstance(e, Exception) and not files.is_panic(e):
                    raise
                encodings = (self._encoded(text, special) for text in part)  # reports the error at the text that has it
            yield from encodings

    def _encoded(self, text: str | tuple[str, str], add_special_tokens: bool) -> Any:
        """Encode a text or a pair of texts; see `encode`."""
        try:
            # a batch of one, because `encode` does not release the GIL
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as e:
            reason = "it has unpaired surrogates" if isinstance(text, str | tuple) else reason_of(e)
            remedy = "pass a str of valid Unicode; at a terminal, text in UTF-8"
            raise LlmcError("E621", f"the text cannot be tokenized: {reason}", remedy) from e
        except BaseException as e:  # tokenizers raises a bare Exception if its model has no result, and may panic
            if not isinstance(e, Exception) and not files.is_panic(e):
                raise
            remedy = "check the model's tokenizer.json, or pass token ids instead of text"
            raise LlmcError("E621", f"the tokenizer fails on the text: {reason_of(e)}", remedy) from e

    def encode_kept(self, text: str, keep: int | None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text` as `encode` does, without the last tokens of the text beyond `keep` ids (None: all).

        Special tokens around the text are kept.
        """
        encoding = self._encoded(text, add_special_tokens)
        return [encoding.ids[i] for i in _kept(encoding, 0, keep)]

    def encode_pair(self, text: str, other: str, segment: int = 0, keep: int | None = None) -> list[int]:
        """Return the ids of two texts, joined as the post-processor joins a pair. `segment` is added to the ids of the
        second text's segment. `keep` is as in `encode_kept`, for tokens of the second text.

        Raises LlmcError E621 as `encode` does.
        """
        encoding = self._encoded((text, other), True)
        ids, kinds = encoding.ids, encoding.type_ids
        return [ids[i] + segment * kinds[i] for i in _kept(encoding, 1, keep)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids beyond the vocabulary (padding rows of an embedding) have no text."""
        decode = self.backend.decode_batch  # a batch of one, as in `encode`
        return str(decode([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def token_text(self, token_id: int) -> str:
        """Return the text of one id, special or not. Results are cached: log-probabilities reuse the same ids."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id as stored in the file, or None."""
        return self.backend.id_to_token(token_id)

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary entries of ids. An entry is looked up in the library once, which takes 20 times as long
        as here.
        """
        entries = self._entries
        for i in set(ids).difference(entries):
            entries[i] = self.token(i)
        return [entries[i] for i in ids]

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""
        return self.backend.token_to_id(token)

    def named_id(self, name: str) -> int | None:
        """Return the id of a named special token such as "bos_token"; None if the files do not name it."""
        token = self.named_tokens.get(name)
        return None if token is None else self.token_id(token)

    @property
    def eos_token(self) -> str | None:
        """The token that the files call `eos_token`, or None."""
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`, or None."""
        return self.named_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The token that the files call `bos_token`, or None."""
        return self.named_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`, or None."""
        return self.named_id("bos_token")

    def __len__(self) -> int:
        return self.vocab_size

    def render_chat(self, messages: Sequence[Message], template: str | None = None, **variables: Any) -> str:
        """Return a conversation as the text of a prompt. `template` is a template or the name of one of the model's
        (None: the default). `variables` are those of `ChatTemplate.render`, and of the template.

        Raises LlmcError E630 to E634.
        """
        text = choose_template(self.chat_templates, template, variables.get("tools"))
        if text not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[text] = ChatTemplate(text, self.named_tokens)
        if (name := self._templates[text].unshown(variables)) is not None:
            cause = f"{name}: the chat template does not show {name}"
            raise LlmcError("E630", cause, "pass another template (chat_template=TEXT)")
        return self._templates[text].render(messages, **variables)

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int] | list[str] | list[list[int]]:
        """Return one or several conversations as text, or as ids, with the arguments of transformers' method.

        Raises LlmcError E630 to E634, and E648 for arguments that are not supported.
        """
        for name in variables.keys() & _ELSEWHERE.keys():
            if variables.pop(name):
                raise LlmcError("E648", f"apply_chat_template: {name} is not supported", _ELSEWHERE[name])
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        chats: Sequence[Any] = conversation if several else [conversation]
        variables["add_generation_prompt"] = add_generation_prompt
        texts = [self.render_chat(chat, chat_template, **variables) for chat in chats]
        prompts: list[str] | list[list[int]] = texts
        if tokenize:
            prompts = list(self.encode_all(texts, add_special_tokens=False))
        return prompts if several else prompts[0]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return the vocabulary entries of an id or of several, as transformers' method does."""
        return self.token(ids) if isinstance(ids, int) else self.tokens(ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the ids of a vocabulary entry or of several; for others that of `unk_token`, or None."""
        unknown = self.named_id("unk_token")
        ids = [self.token_id(token) for token in ([tokens] if isinstance(tokens, str) else tokens)]
        known_ids = [unknown if i is None else i for i in ids]
        return known_ids[0] if isinstance(tokens, str) else known_ids

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by vocabulary entry."""
        return self.backend.get_vocab(with_added_tokens=True)


def _kept(encoding: Any, sequence: int, keep: int | None) -> Iterable[int]:
    """Return the indices of the tokens that remain if the last ones of a sequence are dropped, until `keep` remain."""
    excess = 0 if keep is None else len(encoding.ids) - keep
    if excess <= 0:
        return range(len(encoding.ids))
    positions = [i for i, of in enumerate(encoding.sequence_ids) if of == sequence]
    dropped = set(positions[-excess:])
    return [i for i in range(len(encoding.ids)) if i not in dropped]


def _backend(folder: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json. Raises LlmcError E150 if the folder has none, E151 if it is malformed or too large."""
    path = folder / TOKENIZER_FILE
    if not path.exists():
        others = [name for name in _OTHER_FORMATS if (folder / name).exists()]
        other_files = f"; it has only {', '.join(others)}" if others else ""
        raise LlmcError(
            "E150",
            f"no {TOKENIZER_FILE} in {folder}{other_files}",
            "write one (transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)) and compile again,"
            " or pass token ids instead of text",
        )
    try:
        return files.open_backend(path)
    except BaseException as e:  # tokenizers raises a bare Exception for malformed files, and panics for some
        if not isinstance(e, Exception) and not files.is_panic(e):
            raise
        raise corrupt(path, e) from e


def _special_names(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named special tokens, each a str or an added-token object. Old folders have a file for them."""
    names = {k: v for k, v in config.items() if k in NAMED or (k.endswith("_token") and _content(v))}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        names.update(extra)
    if "added_tokens_decoder" not in config:
        legacy = read_json(folder / "special_tokens_map.json", {})
        names.update({k: v for k, v in legacy.items() if k.endswith("_token")})
    return {k: v for k, v in names.items() if _content(v)}


def _content(value: Any) -> str | None:
    """Return the text of a token that is a str or an added-token object."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return str(value["content"])
    return None


def _added(value: Any, *, special: bool) -> tokenizers.AddedToken:
    """Return an added token of tokenizer_config.json, a text or an object."""
    from tokenizers import AddedToken

    if isinstance(value, dict):
        flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in value}
        return AddedToken(str(_content(value)), special=bool(value.get("special", special)), **flags)
    return AddedToken(str(value), special=special)


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Add tokens of the config that tokenizer.json lacks, in transformers' order: config ids, names, extras."""
    present = list(backend.get_added_tokens_decoder().values())
    seen = {repr(token) for token in present}
    declared = config.get("added_tokens_decoder")
    rows = sorted(declared.items(), key=lambda row: _index(row[0])) if isinstance(declared, dict) else []
    tokens = [_added(value, special=False) for _, value in rows if _content(value) is not None]
    missing = [token for token in tokens if repr(token) not in seen]
    contents = {token.content for token in present} | {token.content for token in missing}
    for value in _named_and_extra(config, names):
        text = _content(value)
        if text is not None and text not in contents:
            contents.add(text)
            missing.append(_added(value, special=True))
    if missing:
        backend.add_tokens(missing)


def _index(text: str) -> int:
    return int(text) if text.isdecimal() else 1 << 60


def _named_and_extra(config: Mapping[str, Any], names: Mapping[str, Any]) -> Iterable[Any]:
    yield from names.values()
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    if isinstance(extra, list):
        yield from extra
