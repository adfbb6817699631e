"""Small tokenizers of the kinds that real models have, as folders; used by the tests of text, LLM and command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The kernel of a matrix is the set of vectors that it sends to zero. A page table maps the rows of a sequence.",
    "Größe, naïve, façade, 東京は日本の首都です。 Привет, мир! 🙂🙃🚀 é à ü ñ — “quotes” … 한국어 العربية",
    "def step(rows, tokens):\n    return [t + 1 for t in tokens]  # next\n\n\tx = {'a': 1}\n",
    "once upon a time there was a small compiler that liked to write short sentences about the sea and the sky",
)
SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ 'user' if m['role'] != 'assistant' else 'assistant' }}|>"
    "{{ m['content'] | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(*, bos: bool = False) -> Tokenizer:
    """As Llama 3, Qwen, GPT-2: byte-level BPE, specials at the end of the vocabulary."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tok.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), AddedToken("naïve x", special=False)])
    if bos:
        tok.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]
        )
    return tok


def sentencepiece(*, prefix_space: bool = True, bos: bool = True, strip: int = 1) -> Tokenizer:
    """As Llama 2 and Mistral (prefix space) or Gemma (none): BPE over ▁ with byte fallback."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    bpe.train_from_iterator(
        [t for t in CORPUS if t.isascii()], trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    learned = json.loads(bpe.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "�"]
    names += [t for t in sorted(learned["vocab"], key=learned["vocab"].get) if t not in names]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    tok = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(names)}, merges=merges, unk_token="<unk>", fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", strip, 0))
    else:
        tok.normalizer = normalizers.Replace(" ", "▁")
    tok.decoder = decoders.Sequence(steps)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if bos:
        tok.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tok


def metaspace() -> Tokenizer:
    """As T5-like vocabularies: Unigram, whose decoder drops the first space."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def wordpiece() -> Tokenizer:
    """As BERT: words with a leading space unless they continue one."""
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def bare() -> Tokenizer:
    """A vocabulary without a decoder: its tokens are joined by spaces."""
    tok = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3, "…": 4}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return tok


def write_folder(folder: Path, tok: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write tokenizer.json, tokenizer_config.json and further JSON files (name=object) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | (config or {})
    for name, value in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def small() -> Tokenizer:
    """64 entries, letter by letter, for models with a vocabulary that small; id 0 ends a text."""
    names = ["</s>", "<|user|>", "<|assistant|>", "<|end|>", "▁", "\n", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLM"]
    names += [*"0123456789.,!?'-:;()", "é"][: 64 - len(names)]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(names)}, merges=[]))
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names[:4]])
    return tok
