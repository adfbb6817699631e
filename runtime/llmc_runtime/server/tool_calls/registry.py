"""All call formats, by the names of vLLM's parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from llmc_runtime.server.tool_calls import json_formats, marked_formats, pythonic_formats, xml_formats
from llmc_runtime.server.tool_calls.call_format import CallFormat

# The first that matches is used, by name or by template.
FORMATS: Sequence[type[CallFormat]] = (
    json_formats.MistralArgs, json_formats.Mistral, json_formats.OpenAI,
    xml_formats.Qwen3Coder, xml_formats.SeedOss, xml_formats.MiniMaxM2, xml_formats.Glm45,
    marked_formats.DeepSeekV3, marked_formats.DeepSeekV31, marked_formats.KimiK2,
    marked_formats.Granite, marked_formats.Granite20b, marked_formats.Phi4Mini,
    pythonic_formats.Lfm2, pythonic_formats.Llama4Pythonic, pythonic_formats.Pythonic,
    json_formats.Hermes, json_formats.Llama3Json,
)  # fmt: skip
# Aliases.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_xml": "qwen3_coder",
        "mimo": "qwen3_coder",
        "llama4_json": "llama3_json",
        "granite4": "hermes",
        "glm47": "glm45",
    }
)
