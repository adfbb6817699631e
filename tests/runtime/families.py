"""The same two calls in the format of each model family, for the servers of `parrots`."""

from __future__ import annotations

import json
from collections.abc import Mapping

CALL = {"city": "Köln", "days": [1, 2]}
DUMPED = json.dumps(CALL, ensure_ascii=False)
# server: two calls as its model writes them, and the reasoning before them
WRITTEN: Mapping[str, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "",
    ),
    "llama": ('{"name": "get_weather", "parameters": %s}; {"name": "now", "parameters": {}}', ""),
    "mistral": ('[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}, {"name": "now", "arguments": {}}]', ""),
    "args": ("[TOOL_CALLS]get_weather[ARGS]%s[TOOL_CALLS]now[ARGS]{}", "[THINK]Hm, so.[/THINK]"),
    "think": (
        '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call><tool_call>{"name": "now", "arguments": {}}'
        "</tool_call>", "<think>\nHm, so.\n</think>\n\n",
    ),
    "opens": (
        '<tool_call>{"arguments": %s, "name": "get_weather"}</tool_call><tool_call>{"name": "now"}</tool_call>',
        "Hm, so.\n</think>\n",
    ),
    "coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n[1, 2]\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "",
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "<think>Hm, so.</think>\n",
    ),
    "python": ("[get_weather(city='Köln', days=[1, 2]), now()]", ""),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
    ),
}  # fmt: skip
FAMILIES = tuple(WRITTEN)
BEGINS = {
    "hermes": "<tool_call>",
    "think": "<tool_call>",
    "coder": "<tool_call>",
    "glm": "<tool_call>",
    "llama": '{"name"',
    "python": "[get_",
    "deepseek": "<｜tool▁calls▁begin｜>",
}
ENDS = {
    "hermes": "</tool_call>",
    "think": "</tool_call>",
    "coder": "</tool_call>",
    "glm": "</tool_call>",
    "mistral": "]",
    "python": "]",
    "deepseek": "<｜tool▁calls▁end｜>",
}
