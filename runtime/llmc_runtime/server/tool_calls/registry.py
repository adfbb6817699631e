"""The call formats, with the names of vLLM's parsers. To add one, declare a class here and list it in FORMATS.

Installed packages add formats by name under the entry-point group `llmc_runtime.call_formats`; each value names a
subclass of CallFormat. The group is read only when a name is not one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmc_runtime.format.entry_point import offered_class, offers
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.json_shape import Json, JsonShape, Optional, UnmarkedJson, Word
from llmc_runtime.server.tool_calls.message_shape import MessageShape
from llmc_runtime.server.tool_calls.python_shape import PythonShape
from llmc_runtime.server.tool_calls.xml_shape import LINE, Xml, XmlShape

GROUP = "llmc_runtime.call_formats"  # entry-point group of formats from other packages
_PYTHON_CALL = re.compile(r"\[func_name1\(|name\s*[+~]\s*['\"]\(")


class Hermes(JsonShape):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, used by Hermes and Qwen."""

    name = "hermes"
    aliases = ("granite4",)
    markers = ("<tool_call>", "</tool_call>")
    shown = ("<tool_call>", "arguments")
    hidden = ("<function=", "<arg_key>", "<parameter=")  # other families write XML after the same mark
    token = "<tool_call>"
    call = ("\n", Json.OBJECT, "\n")
    end = "</tool_call>"


_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_LISTED = (Optional((" ",), enforced=False), Json.LIST)
_NAMED = (Json.NAME, Optional(("[CALL_ID]", Word.ID), enforced=False), Optional(("[ARGS]",)), Json.ARGUMENTS)


class Mistral(JsonShape):
    """[TOOL_CALLS] with a list of {"name": ..., "arguments": {...}}, or MistralArgs' notation."""

    name = "mistral"
    markers = _MISTRAL
    short_ids = True
    between = None
    shown = ("[TOOL_CALLS]",)
    token = "[TOOL_CALLS]"
    call = _LISTED
    other_calls = (_NAMED, (Json.OBJECT,))


class MistralArgs(JsonShape):
    """[TOOL_CALLS]NAME[ARGS]{...} for each call, used by newer models of Mistral; it reads the older notation too."""

    name = "mistral"
    markers = _MISTRAL
    short_ids = True
    between = ""
    shown = ("[TOOL_CALLS]", "[ARGS]")
    token = "[ARGS]"
    call = _NAMED
    other_calls = (_LISTED, (Json.OBJECT,))


class Granite(JsonShape):
    """A JSON list after <|tool_call|> or <tool_call>, used by Granite 3."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")
    others = ("<tool_call>",)
    between = None
    shown = ("<|tool_call|>",)
    hidden = ("<|tool|>",)  # Phi-4-mini writes the same mark around tools
    call = (Json.LIST,)


class Phi4Mini(JsonShape):
    """A JSON list after the word functools, used by Phi-4-mini."""

    name = "phi4_mini_json"
    markers = ("functools[",)
    between = None
    shown = ("functools[",)
    call = (Json.LIST,)


class Granite20b(JsonShape):
    """<function_call> {"name": ..., "arguments": {...}}, used by Granite 20B."""

    name = "granite-20b-fc"
    markers = ("<function_call>",)
    shown = ("<function_call>",)
    call = (" ", Json.OBJECT)


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)  # fmt: skip


class DeepSeekV31(JsonShape):
    """<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜> in a section, used by DeepSeek V3.1."""

    name = "deepseek_v31"
    markers = _DEEPSEEK
    between = None
    shown = ("<｜tool▁call▁begin｜>",)
    hidden = ("```json",)
    call = ("<｜tool▁call▁begin｜>", Json.NAME, "<｜tool▁sep｜>", Json.ARGUMENTS, "<｜tool▁call▁end｜>")
    end = "<｜tool▁calls▁end｜>"


class DeepSeekV3(JsonShape):
    """The same with the word function, the name after <｜tool▁sep｜>, and the arguments in a Markdown code block.

    Used by DeepSeek V3 and R1.
    """

    name = "deepseek_v3"
    markers = _DEEPSEEK
    between = None
    shown = ("<｜tool▁call▁begin｜>", "```json")
    call = (
        "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", Json.NAME, "\n```json\n", Json.ARGUMENTS, "\n```",
        "<｜tool▁call▁end｜>",
    )  # fmt: skip
    end = "<｜tool▁calls▁end｜>"
    line = "\n"


class KimiK2(JsonShape):
    """<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>, used by Kimi K2.

    The template writes a call's id in place of its name.
    """

    name = "kimi_k2"
    markers = (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip
    between = None
    id_format = "functions.{name}:{index}"
    shown = ("<|tool_calls_section_begin|>",)
    token = "<|tool_calls_section_begin|>"
    call = (
        "<|tool_call_begin|>", Optional(("functions.",)), Json.NAME, Optional((":", Word.INDEX)),
        "<|tool_call_argument_begin|>", Json.ARGUMENTS, "<|tool_call_end|>",
    )  # fmt: skip
    end = "<|tool_calls_section_end|>"


class Qwen3Coder(XmlShape):
    """<tool_call><function=NAME><parameter=KEY> VALUE </parameter></function></tool_call>, used by Qwen3-Coder."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml", "mimo")
    markers = ("<tool_call>", "</tool_call>")
    shown = ("<tool_call>", "<function=", "<parameter=")
    call = ("<function=", Xml.NAME, ">", "\n", Xml.FIELDS, "</function>")
    field = ("<parameter=", Xml.KEY, ">", "\n", Xml.VALUE, "\n", "</parameter>", "\n")


class SeedOss(XmlShape):
    """<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>, used by Seed-OSS."""

    name = "seed_oss"
    markers = ("<seed:tool_call>", "</seed:tool_call>")
    shown = ("seed:tool_call",)
    call = ("<function=", Xml.NAME, ">", "\n", Xml.FIELDS, "</function>")
    field = ("<parameter=", Xml.KEY, ">", Xml.VALUE, "</parameter>", "\n")


class MiniMaxM2(XmlShape):
    """<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>, used
    by MiniMax-M2.
    """

    name = "minimax_m2"
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")
    between = None
    shown = ("minimax:tool_call", "<invoke name=")
    call = ('<invoke name="', Xml.NAME, '">', "\n", Xml.FIELDS, "</invoke>")
    field = ('<parameter name="', Xml.KEY, '">', Xml.VALUE, "</parameter>", "\n")


class Glm45(XmlShape):
    """<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, and </tool_call>.

    GLM-4.5 writes each on a line of its own, GLM-4.7 does not.
    """

    name = "glm45"
    aliases = ("glm47",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    between = ""
    shown = ("<tool_call>", "<arg_key>")
    call = (Xml.NAME, LINE, Xml.FIELDS, "</tool_call>", LINE)
    field = ("<arg_key>", Xml.KEY, "</arg_key>", LINE, "<arg_value>", Xml.VALUE, "</arg_value>", LINE)


class Llama3Json(UnmarkedJson):
    """{"name": ..., "parameters": {...}} at the start of a line or after <|python_tag|>, used by Llama 3."""

    name = "llama3_json"
    aliases = ("llama4_json",)
    markers = ("<|python_tag|>",)
    several = False
    shown = ("parameters",)
    pattern = re.compile(r"<\|python_tag\|>|ipython")
    token = "<|python_tag|>"
    arguments_key = "parameters"
    separator = ";"


class Pythonic(PythonShape):
    """[NAME(KEY=VALUE, ...), ...] at the start of a line, or between <|python_start|> and <|python_end|>."""

    name = "pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    hidden = ("<|python_start|>",)
    pattern = _PYTHON_CALL


class Llama4Pythonic(PythonShape):
    """The same, used by Llama 4."""

    name = "llama4_pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    shown = ("<|header_start|>",)
    pattern = _PYTHON_CALL


class Lfm2(PythonShape):
    """The same between <|tool_call_start|> and <|tool_call_end|>, used by LFM2."""

    name = "lfm2"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    marks_enforced = True
    shown = ("<|tool_call_start|>",)
    token = "<|tool_call_start|>"


class OpenAI(MessageShape):
    """<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}, used by gpt-oss (the Harmony format).

    Answers are messages of the channel final. The channel analysis before them is reasoning (see `reasoning`).
    """

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
    shown = ("<|channel|>", "<|message|>")
    start = ("<|start|>", "assistant")
    channel = "<|channel|>"
    message = "<|message|>"
    end = "<|end|>"
    answer = "final"
    comment = "commentary"
    recipient = " to="
    call = ("commentary", " to=", "functions.", Json.NAME, " ", "<|constrain|>", "json")


# Of those that fit a template or a token, the first is used; of those with the same name, the last.
FORMATS: Sequence[type[CallFormat]] = (
    MistralArgs, Mistral, OpenAI, Qwen3Coder, SeedOss, MiniMaxM2, Glm45, DeepSeekV3, DeepSeekV31, KimiK2, Granite,
    Granite20b, Phi4Mini, Lfm2, Llama4Pythonic, Pythonic, Hermes, Llama3Json,
)  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names and aliases of our formats."""
    return tuple(dict.fromkeys(name for form in FORMATS for name in (form.name, *form.aliases)))


def is_offered(name: str) -> bool:
    """Return whether an installed package offers a call format under this name."""
    return offers(GROUP, name)


def call_format(name: str) -> type[CallFormat] | None:
    """Return the call format that has this name or alias, ours or that of an installed package; None if there is none.

    Raises LlmcError E601 if two packages offer it, or if it cannot be loaded.
    """
    ours = [form for form in FORMATS if name in (form.name, *form.aliases)]
    if ours:
        return ours[-1]
    if not is_offered(name):
        return None
    form, cause = offered_class(GROUP, name, CallFormat)  # type: ignore[type-abstract]
    if form is None:
        raise LlmcError("E601", f"tool_call_parser = {name[:60]!r}: {cause}", "uninstall or correct the package")
    return form
