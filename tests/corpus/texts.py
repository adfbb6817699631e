"""Damaged tokenizers and chat templates, and templates that are made to be slow or large."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import textkit
from corpus.damage import changed, damaged, flipped
from corpus.headers import DEVICES, exit_code_of
from corpus.judge import Case
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.text.chat_template import ChatTemplate, choose_template
from llmc_runtime.text.tokenizer import Tokenizer

from llmc.frontend.tokenizer_files import check_tokenizer

OTHER = "it is a tokenizer, of another kind"
TEXT = "Hello wörld, 東京 🙂\n\t<|user|> 12345 " + "a" * 300
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": "x"},
]
NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def use(folder: Path) -> None:
    """Open a tokenizer, and use it as a request does."""
    tokenizer = Tokenizer.open(folder)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids[:1000])
    tokenizer.decode([0, 5, 1 << 20, (1 << 32) - 1], skip_special_tokens=False)
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id >= 0
    if tokenizer.chat_templates:
        text = choose_template(tokenizer.chat_templates, None, None)
        ChatTemplate(text, tokenizer.named_tokens).render(CHAT)


def carried(folder: Path) -> None:
    """Files that a compile copies into an artifact can be opened there."""
    check_tokenizer(folder)
    try:
        use(folder)
    except LlmcError as e:
        assert e.code not in ("E150", "E151"), f"a compile takes what the runtime refuses: {e}"


def write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data)


def good(folder: Path) -> list[Path]:
    """Folders with tokenizers of several kinds."""
    kinds = {
        "bytes": textkit.byte_level(bos=True), "pieces": textkit.sentencepiece(), "unigram": textkit.metaspace(),
        "words": textkit.wordpiece(), "small": textkit.small(),
    }  # fmt: skip
    config = {
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": textkit.TEMPLATE,
        "added_tokens_decoder": {"3": {"content": "<|user|>", "special": True}}, "model_max_length": 1e30,
        "extra_special_tokens": {"image_token": "<img>"},
    }  # fmt: skip
    return [textkit.write_folder(folder / name, tok, config) for name, tok in kinds.items()]


def tokenizers(folder: Path, rng: Random, count: int) -> Iterator[Case]:
    """Bytes and documents changed, every length of the small files, devices in the place of files."""
    sources = good(folder)
    contents = [(s, n, (s / n).read_bytes()) for s in sources for n in NAMES if (s / n).is_file()]
    for i in range(count):
        source, name, data = rng.choice(contents)
        if i % 3 == 0 and name.endswith(".json"):
            doc, words = changed(json.loads(data), rng)
            bad = json.dumps(doc).encode()
        else:
            bad, words = (flipped if i % 3 == 1 else damaged)(data, rng)
        yield Case("tokenizers", f"{source.name}/{name}: {words}", partial(_harmed, source, name, bad), OTHER)
        if i % 10 == 0:
            size = rng.randrange(len(data))
            yield Case("tokenizers", f"{source.name}/{name} cut to {size}", partial(_harmed, source, name, data[:size]))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for what, make in DEVICES.items():
            harmless = OTHER if name != "tokenizer.json" else ""
            yield Case("tokenizers", f"{name} {what}", partial(_replaced, sources[0], name, make), harmless)
    for name, change in LARGE.items():
        yield Case("tokenizers", name, partial(_edited, sources[1], change), OTHER)


def _harmed(source: Path, name: str, bad: bytes, folder: Path) -> int:
    for each in source.iterdir():
        os.link(each, folder / each.name)
    write(folder, name, bad)
    return exit_code_of(lambda: (use if len(bad) % 2 else carried)(folder))


def _replaced(source: Path, name: str, make: Callable[[Path], Any], folder: Path) -> int:
    for each in source.iterdir():
        os.link(each, folder / each.name)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    return exit_code_of(lambda: use(folder))


def _edited(source: Path, change: Callable[[dict[str, Any]], None], folder: Path) -> int:
    doc = json.loads((source / "tokenizer.json").read_text())
    change(doc)
    return _harmed(source, "tokenizer.json", json.dumps(doc).encode(), folder)


def _at(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(doc: dict[str, Any]) -> None:
        for key in path[:-1]:
            doc = doc[key]
        doc[path[-1]] = value

    return change


def _replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


LARGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "padding to 2**40": _at("padding", value={
        "strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x"}),
    "truncation to nothing": _at("truncation", value={
        "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 1 << 40}),
    "a letter becomes a million": _at("normalizer", value=_replace({"String": "a"}, "b" * 1_000_000)),
    "nothing becomes something": _at("normalizer", value=_replace({"String": ""}, "b")),
    "letters become more, again and again": _at("normalizer", value={
        "type": "Sequence", "normalizers": [_replace({"String": "a"}, "a" * 300)] * 6}),
    "a slow expression": _at("pre_tokenizer", value=_split("(a+)+$b")),
    "a slower expression": _at("pre_tokenizer", value=_split("(?:a?){300}a{300}$c")),
    "an expression that is none": _at("pre_tokenizer", value=_split("(((")),
    "a large expression": _at("pre_tokenizer", value=_split("(?:(?:a{1000}){1000}){1000}")),
    "an id beyond all": _at("model", "vocab", "a", value=(1 << 32) - 1),
    "an id beyond that": _at("model", "vocab", "a", value=1 << 40),
    "an added id beyond all": _at("added_tokens", value=[
        {"id": (1 << 32) - 1, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}]),
    "a template of one token many times": _at("post_processor", value={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 100_000,
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}),
    "special ids many times": _at("post_processor", value={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 100,
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 50_000, "tokens": ["<s>"] * 50_000}}}),
    "a charsmap that is none": _at("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAAgIA="}),
    "an empty charsmap": _at("normalizer", value={"type": "Precompiled", "precompiled_charsmap": ""}),
    "no vocabulary": _at("model", "vocab", value={}),
    "merges of nothing": _at("model", "merges", value=[["zzz", "yyy"]]),
    "a decoder that strips 2**60": _at("decoder", value={"type": "Strip", "content": " ", "start": 1 << 60, "stop": 1}),
}  # fmt: skip

DEEP = "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}"
DOUBLED = "{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
HOSTILE: dict[str, str] = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "include": "{% include '/etc/passwd' %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10**10 }}",
    "power": "{{ 9 ** 99999999 }}",
    "range": "{{ range(10**9)|list }}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(70) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "wide letters": "{% set n = namespace(x='\U0001f642') %}"
    "{% for i in range(70) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "kept in a list": "{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + ['a' * (999999 + i)] %}{% endfor %}{{ n.x|length }}",
    "wide ones kept": "{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + ['\U0001f642' * (999999 + i)] %}{% endfor %}{{ n.x|length }}",
    "kept by slices": "{% set b = 'ab' * 4000000 %}{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + [b[i:]] %}{% endfor %}{{ n.x|length }}",
    "kept by upper": "{% set b = 'ab' * 2000000 %}{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + [b|upper] %}{% endfor %}{{ n.x|length }}",
    "kept by methods": "{% set b = 'ab' * 2000000 %}{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + [b.upper()] %}{% endfor %}{{ n.x|length }}",
    "split": "{{ ('a ' * 4000000).split()|length }}",
    "list of letters": "{{ ('\U0001f642' * 4000000)|list|length }}",
    "batch": "{{ range(99999)|batch(1)|list|length }}",
    "batch filled": "{{ [1]|batch(99999999, 'x')|list|length }}",
    "slice": "{{ [1]|slice(99999999)|list|length }}",
    "groupby": "{{ range(99999)|map('string')|groupby('x')|list|length }}",
    "sort": "{% for i in range(999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "wordwrap": "{{ ('a ' * 1000000)|wordwrap(1)|length }}",
    "wordwrap long": "{{ ('a' * 4000000)|wordwrap(1, true, 'bbbbbbbb')|length }}",
    "urlize": "{{ ('http://a.b ' * 300000)|urlize|length }}",
    "escape": "{{ ('<' * 8000000)|e|length }}",
    "tojson": "{{ (['<'] * 2000000)|tojson|length }}",
    "tojson deep": DEEP + "{{ n.x|tojson }}",
    "print deep": DEEP + "{{ n.x }}",
    "compare deep": "{% set n = namespace(x=[],y=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}"
    "{% set n.y = [n.y] %}{% endfor %}{{ n.x == n.y }}",
    "doubling lists": DOUBLED + "{{ n.x }}",
    "doubling json": DOUBLED + "{{ n.x|tojson }}",
    "doubling compare": "{% set n = namespace(x=[1],y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "namespaces": "{% set n = namespace(x=1) %}"
    + "{% set m = namespace() %}{% set m.a = n %}{% set m.b = n %}{% set n = m %}" * 40
    + "{{ n }}",
    "keys": "{% set n = namespace(x=(1,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
    "{{ {n.x: 1} }}{{ {}[n.x] }}",
    "tests": "{% set n = namespace(x=[1],y=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x is eq n.y }}{{ [n.x].index(n.y) }}",
    "in": "{{ ('a' * 4000000 ~ 'b') in ('a' * 8000000) }}",
    "count": "{% for i in range(99999) %}{{ ('ab' * 4000000).count('b') }}{% endfor %}",
    "sum": "{{ ([[1] * 9999] * 9999)|sum(start=[])|length }}",
    "regex": "{{ ('a' * 100000)|striptags }}{{ ('<' * 100000)|striptags|length }}",
    "comments": "{{ ('<!--' * 100000)|striptags|length }}",
    "format": "{{ '%s' * 1000000 % (('x',) * 1000000) }}",
    "float": "{{ '%.99999f' % 1.5 }}{{ '{:.99999}'.format(1.5) }}",
    "int": "{{ ('9' * 100000)|int }}",
    "random": "{{ range(99999)|random }}",
    "cycler": "{% set c = cycler('a') %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep fors": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "deep brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "a long sum": "{{ " + "1 + " * 32000 + "1 }}",
    "a long or": "{{ " + "a or " * 25000 + "a }}",
    "a long chain": "{{ a" + ".b" * 65000 + " }}",
    "nots": "{{ " + "not " * 32000 + "1 }}",
    "minuses": "{{ " + "-" * 130000 + "1 }}",
    "filters": "{{ 1" + "|string" * 18000 + " }}",
    "elifs": "{% if a %}" + "{% elif a %}" * 4990 + "{% endif %}",
    "many names": "".join(f"{{% set a{i} = 'x' * 999999 %}}" for i in range(900)),
    "many variables": "".join(f"{{% set a{i} = {i} %}}" for i in range(4900)),
    "more variables": "".join(f"{{% set a{i} = {i} %}}" for i in range(40000)),
    "many blocks": "".join(f"{{% block a{i} %}}{{% endblock %}}" for i in range(2450)),
    "many macros": "".join(f"{{% macro a{i}() %}}{{% endmacro %}}" for i in range(2450)),
    "much text": "x" * 130_000,
    "too much text": "x" * 1_100_000,
    "many braces": "{{" * 300000,
    "many comments": "{# #}" * 4999,
    "an open comment": "{#" * 300000,
    "a number of many digits": "{{ " + "9" * 130000 + " }}",
    "many expressions": "{{ 1 }}" * 4999,
    "raw": "{% raw %}" * 4999,
    "surrogates": "\\ud800",
    "lines": "{{ raise_exception('\\n' * 1000 ~ 'x' * 100000) }}",
    "control letters": "{{ raise_exception('\x1b[2J\x1b[31m') }}",
}


def templates(folder: Path, rng: Random, count: int) -> Iterator[Case]:
    """Malicious templates, and real ones with changed bytes."""
    for name, text in HOSTILE.items():
        yield Case("templates", name, partial(_rendered, text), "it ends in time, within its memory")
    real = [p.read_text() for p in sorted((Path(__file__).parents[1] / "runtime/chat_templates").glob("*.jinja"))]
    for _ in range(count):
        text = rng.choice([*real, textkit.TEMPLATE])
        bad, words = rng.choice((flipped, damaged))(text.encode(), rng)
        yield Case("templates", words, partial(_rendered, bad.decode("utf-8", "replace")), "it is another template")


def _rendered(text: str, folder: Path) -> int:
    return exit_code_of(lambda: ChatTemplate(text, {"bos_token": "<s>"}).render(CHAT))
