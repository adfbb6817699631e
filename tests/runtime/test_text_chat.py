"""Chat templates: the same text as transformers' apply_chat_template, and nothing a hostile one could use."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import textkit
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.text.chat_template import ChatTemplate, choose_template
from llmc_runtime.text.sandbox import Budget, OverBudget
from llmc_runtime.text.tokenizer import Tokenizer

TEMPLATES = {p.stem: p.read_text() for p in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
USER = {"role": "user", "content": '  What is <b>"π"</b>?\nTell me. '}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAbout 3.14 "}
TOOL_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<&>'"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add", "description": "Adds & returns.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}  # fmt: skip
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "system": ([{"role": "system", "content": " Be brief. "}, USER], {}),
    "several turns": ([USER, ASSISTANT, USER, ASSISTANT, USER], {}),
    "no generation prompt": ([USER, ASSISTANT], {"add_generation_prompt": False}),
    "to be continued": ([USER, ASSISTANT], {"add_generation_prompt": False, "continue_final_message": True}),
    "tools": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
         {"role": "tool", "content": "12", "tool_call_id": "abcdefghi"}],
        {"tools": [TOOL]},
    ),
    "variables of the template": ([USER], {"date_string": "1 Jan 2030", "enable_thinking": False}),
    "wrong order": ([ASSISTANT, USER], {}),
    "two tool calls": ([USER, {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL, TOOL_CALL]}], {}),
}  # fmt: skip
TOOLED = {"channels", "llama3", "mistral", "mistral_args", "qwen2.5", "qwen3", "reasoner"}
TOOLED |= {"deepseek_v31", "glm45", "pythonic", "qwen3_coder"}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=textkit.byte_level(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(theirs: Any, name: str, chat: str) -> None:
    import jinja2

    messages, options = CHATS[chat]
    options = {"add_generation_prompt": True, **options}
    ours = ChatTemplate(TEMPLATES[name], theirs.special_tokens_map)
    try:
        expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    except jinja2.TemplateError as refused:
        with pytest.raises(LlmcError) as e:
            ours.render(messages, **options)
        assert e.value.code == "E632"
        assert str(refused) in e.value.cause
    except TypeError as failed:  # the template joins arguments as text (`arguments_as_text`)
        with pytest.raises(LlmcError) as e:
            ours.render(messages, **options)
        assert ours.features.arguments_as_text and e.value.code == "E633" and str(failed) in e.value.cause
    else:
        assert ours.render(messages, **options) == expected


def test_variables_of_a_generation_block_are_local_as_with_transformers(theirs: Any) -> None:
    text = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    expected = theirs.apply_chat_template(HI, chat_template=text, tokenize=False)
    assert ChatTemplate(text, {}).render(HI) == expected


def test_text_parts_reach_a_template_that_reads_them_and_are_joined_for_others() -> None:
    assert "onetwo<|end|>" in ChatTemplate(TEMPLATES["thinking"], {}).render([PARTS])
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(TEMPLATES["chatml"], {}).render([PARTS])
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    with pytest.raises(LlmcError, match="not text"):
        ChatTemplate(TEMPLATES["chatml"], {}).render([image])


def test_variables_of_a_template_are_known_before_it_is_rendered() -> None:
    found = {name: ChatTemplate(text, {}).features for name, text in TEMPLATES.items()}
    assert {name for name, one in found.items() if one.tools} == TOOLED
    assert {name for name, one in found.items() if one.calls} == TOOLED
    assert {name for name, one in found.items() if one.arguments_as_text} == {"reasoner", "deepseek_v31"}
    start = "{% for m in messages %}{% for c in m.tool_calls %}"
    for text, as_text in (
        ("{{ c.function.arguments }}", True), ("{{ '<' + c['function']['arguments'] + '>' }}", True),
        ("{% set a = c.function.arguments %}{{ c.name ~ a }}", True), ("{{ c.function | tojson }}", False),
        ("{% set a = c.arguments %}{% if a is not string %}{% set a = a | tojson %}{% endif %}{{ a }}", False),
        ("{{ '{' + c.function.arguments | tojson + '}' }}", False),
        ("{% if c.arguments is mapping %}{{ c.arguments | tojson }}{% else %}{{ c.arguments }}{% endif %}", False),
    ):  # fmt: skip
        one = ChatTemplate(start + text + "{% endfor %}{% endfor %}", {}).features
        assert (one.arguments_as_text, one.calls, one.tools, one.parts) == (as_text, True, False, False), text


# --- where templates come from


def folder(tmp_path: Path, config: dict[str, Any], **files: str) -> Tokenizer:
    textkit.write_folder(tmp_path, textkit.byte_level(), config)
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".jinja").write_text(text)
    return Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, {}),
        ({"chat_template": "A"}, {}, {"default": "A"}),
        ({"chat_template": "A"}, {"chat_template": "B"}, {"default": "B"}),
        (
            {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]},
            {},
            {"default": "A", "tool_use": "T"},
        ),
        ({}, {"chat_template": "B", "additional_chat_templates__rag": "R"}, {"default": "B", "rag": "R"}),
    ],
)
def test_templates_are_found_where_transformers_finds_them(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], expected: dict[str, str]
) -> None:
    transformers = pytest.importorskip("transformers")
    ours = folder(tmp_path, config, **files)
    assert dict(ours.chat_templates) == expected
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).chat_template
    assert ({"default": theirs} if isinstance(theirs, str) else theirs or {}) == expected


def test_the_processor_file_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    textkit.write_folder(tmp_path, textkit.byte_level(), chat_template={"chat_template": "P"})
    assert dict(Tokenizer.open(tmp_path).chat_templates) == {"default": "P"}


@pytest.mark.parametrize(
    "value",
    [
        3,
        [{"name": "default", "template": None}],
        [{"nam": "default", "template": "A"}],
        ["A"],
        {"default": ["A"]},
        [[]],
    ],
)
def test_values_other_than_templates_are_refused(value: Any, tmp_path: Path) -> None:
    """It would become the prompt, or be passed over."""
    textkit.write_folder(tmp_path, textkit.byte_level(), config={"chat_template": value})
    with pytest.raises(LlmcError, match=r"E151.*tokenizer_config\.json: its chat_template"):
        Tokenizer.open(tmp_path)


def test_a_template_is_chosen_by_name_by_tools_or_by_default() -> None:
    both = {"default": "A", "tool_use": "T", "rag": "R"}
    assert choose_template(both, None, None) == "A"
    assert choose_template(both, None, [TOOL]) == "T"
    assert choose_template(both, "rag", None) == "R"
    assert choose_template(both, "{{ messages }}", None) == "{{ messages }}"
    with pytest.raises(LlmcError, match=r"\['rag', 'tool_use'\]"):
        choose_template({"rag": "R", "tool_use": "T"}, None, None)
    with pytest.raises(LlmcError, match="no chat template"):
        choose_template({}, None, None)
    for wanted in ("mistyped.jinja", "", 5, ["rag"]):  # as a template's text it would be every prompt
        with pytest.raises(LlmcError, match="E630"):
            choose_template(both, wanted, None)  # type: ignore[arg-type]


# --- bad input


@pytest.mark.parametrize(
    "messages",
    [[], "hi", None, ["hi"], [{"content": "hi"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}]],
)
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with pytest.raises(LlmcError) as e:
        ChatTemplate(TEMPLATES["chatml"], {}).render(messages)
    assert e.value.code == "E631"


def test_nothing_to_continue_is_refused() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    with pytest.raises(LlmcError, match="no text to continue"):
        template.render([{"role": "user", "content": None}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(LlmcError, match="drops the final message"):
        ChatTemplate("x", {}).render(HI, add_generation_prompt=False, continue_final_message=True)


HOSTILE = {
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "E633"),
    "globals": ("{{ cycler.__init__.__globals__.os.system('true') }}", "E633"),
    "include": ("{% include '/etc/passwd' %}", "E633"),
    "import": ("{% import 'os' as os %}", "E633"),
    "mutation": ("{{ messages.append(1) }}", "E633"),
    "undefined": ("{{ a.b.c }}", "E633"),
    "syntax": ("{% for %}", "E633"),
    "unknown tag": ("{% evil %}", "E633"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "E633"),
    "range": ("{{ range(10**9)|list }}", "E633"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "E634"),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "E634"),
    "recursive loop": (
        "{% for x in [[[[1]*99]*99]*99]*99 recursive %}{% if x is iterable %}{{ loop(x) }}{% endif %}{% endfor %}",
        "E634",
    ),
    "times": ("{{ 'a' * 10**10 }}", "E634"),
    "list times": ("{{ [1] * 10**10 }}", "E634"),
    "constant": ("{% if 'a' * 10**10 %}{% endif %}", "E634"),
    "power": ("{{ 9 ** 99999999 }}", "E634"),
    "doubling": (
        "{% set n = namespace(x='aa') %}{% for i in range(70) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "E634",
    ),
    "adding": ("{% set n = namespace(x=[1]) %}{% for i in range(70) %}{% set n.x = n.x + n.x %}{% endfor %}", "E634"),
    "percent": ("{{ '%0999999999999d' % 1 }}", "E634"),
    "percent star": ("{{ '%*d' % (10**10, 1) }}", "E634"),
    "format width": ("{{ '{:>99999999999}'.format(1) }}", "E634"),
    "nested width": ("{{ '{:>{}}'.format(1, 10**10) }}", "E634"),
    "format filter": ("{{ '%099999999999d'|format(1) }}", "E634"),
    "center": ("{{ 'a'|center(99999999999) }}", "E634"),
    "ljust": ("{{ 'a'.ljust(99999999999) }}", "E634"),
    "expandtabs": ("{{ ('\t' * 999).expandtabs(9999999) }}", "E634"),
    "replace": ("{{ ('a' * 999999)|replace('a', 'b' * 999999) }}", "E634"),
    "replace method": ("{{ ('a' * 999999).replace('a', 'b' * 999999) }}", "E634"),
    "join": ("{{ ('a' * 999999)|join('b' * 999999) }}", "E634"),
    "join method": ("{{ ('b' * 999999).join('a' * 999999) }}", "E634"),
    "indent": ("{{ ('\n' * 999999)|indent(999) }}", "E634"),
    "json indent": ("{{ messages|tojson(indent=9999999999) }}", "E634"),
    "translate": ("{{ ('a' * 999999).translate({97: 'b' * 999999}) }}", "E633"),
    "buffer": ("{% set x %}{% for i in range(99999) %}{{ 'a' * 999999 }}{% endfor %}{% endset %}", "E634"),
    "output": ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "E634"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_inert(name: str) -> None:
    text, code = HOSTILE[name]
    with pytest.raises(LlmcError) as e:
        ChatTemplate(text, {}, seconds=0.5).render(HI)
    assert e.value.code == code
    assert e.value.remedy
    assert len(str(e.value)) < 600


def test_the_sandbox_hides_what_filters_could_reach() -> None:
    assert ChatTemplate("{{ messages|attr('__class__') }}", {}).render(HI) == ""
    assert ChatTemplate("{{ messages|map(attribute='__class__')|first is defined }}", {}).render(HI) == "False"
    assert ChatTemplate("{{ '{0.__class__.__init__}'.format(messages) }}", {}).render(HI) == ""
    with pytest.raises(LlmcError):
        ChatTemplate("{{ lipsum() }}", {}).render(HI)


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(LlmcError) as e:
        ChatTemplate("x" * (2 << 20), {})
    assert e.value.code == "E634"


def test_messages_are_not_changed_and_are_no_template() -> None:
    messages = [{"role": "user", "content": "{{ 7*7 }}{% for %}"}]
    before = json.dumps(messages)
    assert "{{ 7*7 }}{% for %}" in ChatTemplate(TEMPLATES["chatml"], {}).render(messages)
    ChatTemplate(TEMPLATES["chatml"], {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


def test_one_template_serves_several_threads() -> None:
    template = ChatTemplate(TEMPLATES["llama3"], {"bos_token": "<s>"})
    found: list[bool] = []

    def work(n: int) -> None:
        for _ in range(20):
            found.append(f"number {n}<|eot_id|>" in template.render([{"role": "user", "content": f"number {n}"}]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_the_budget_is_of_one_rendering() -> None:
    template = ChatTemplate("{{ 'a' * 9000000 if messages[0]['content'] == 'long' else 'ok' }}", {}, seconds=0.2)
    with pytest.raises(LlmcError):
        template.render([{"role": "user", "content": "long"}])
    time.sleep(0.25)
    assert template.render(HI) == "ok"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATES["qwen3"]}
    return Tokenizer.open(textkit.write_folder(folder, textkit.byte_level(), config))


@pytest.mark.parametrize("prompt", (True, False))
@pytest.mark.parametrize("several", (True, False))
def test_the_method_of_a_tokenizer_is_that_of_transformers(
    ours: Tokenizer, theirs: Any, several: bool, prompt: bool
) -> None:
    chat: Any = [[USER], [USER, ASSISTANT, USER]] if several else [USER, ASSISTANT, USER]
    kwargs: Any = {"add_generation_prompt": prompt, "enable_thinking": False}
    text = theirs.apply_chat_template(chat, tokenize=False, chat_template=TEMPLATES["qwen3"], **kwargs)
    ids = theirs.apply_chat_template(chat, chat_template=TEMPLATES["qwen3"], return_dict=True, **kwargs)["input_ids"]
    assert ours.apply_chat_template(chat, tokenize=False, **kwargs) == text
    assert ours.apply_chat_template(chat, **kwargs) == ids
    assert ours.apply_chat_template(chat, return_tensors=None, padding=False, tools=None, **kwargs) == ids
    other = ours.apply_chat_template(chat, tokenize=False, chat_template=TEMPLATES["llama3"], **kwargs)
    assert other == theirs.apply_chat_template(chat, tokenize=False, chat_template=TEMPLATES["llama3"], **kwargs)


@pytest.mark.parametrize("kwargs", ({"return_tensors": "pt"}, {"return_dict": True}, {"max_length": 8}))
def test_other_arguments_of_the_method_are_refused(ours: Tokenizer, kwargs: Any) -> None:
    with pytest.raises(LlmcError, match=f"E648.*{next(iter(kwargs))}"):
        ours.apply_chat_template(HI, **kwargs)
    with pytest.raises(LlmcError, match="E63"):
        ours.apply_chat_template([])


def test_threads_render_one_template_at_the_same_time() -> None:
    """A conversation that takes a second in one thread keeps no other client's waiting."""
    template, entered, over = ChatTemplate("{% for x in slow %}{{ x }}{% endfor %}", {}), Event(), Event()

    def slow() -> Iterator[str]:
        entered.set()
        assert over.wait(60)
        yield "slow"

    found: list[str] = []
    first = Thread(target=lambda: found.append(template.render(HI, slow=slow())), daemon=True)
    second = Thread(target=lambda: found.append(template.render(HI, slow=["fast"])), daemon=True)
    first.start()
    assert entered.wait(60)
    second.start()
    second.join(30)
    assert found == ["fast"]
    over.set()
    first.join(30)
    assert found == ["fast", "slow"]


def test_each_thread_has_the_whole_budget_of_a_rendering() -> None:
    budget = Budget(1e6, 10)
    budget.start()
    with pytest.raises(OverBudget, match="bytes in all"):
        for _ in range(1 << 20):
            budget.tick()
    found: list[BaseException | None] = []

    def other() -> None:
        try:
            budget.start()
            budget.tick()
            found.append(None)
        except OverBudget as e:
            found.append(e)

    thread = Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None] and budget.size == 10
