"""All call formats, by the names of vLLM's parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from llmc_runtime.server.tools import formats, marked, pythonic, xml
from llmc_runtime.server.tools.calls import CallFormat

# The first that matches is used, by name or by template.
FORMATS: Sequence[type[CallFormat]] = (
    formats.MistralArgs, formats.Mistral, formats.OpenAI, xml.Qwen3Coder, xml.SeedOss, xml.MiniMaxM2, xml.Glm45,
    marked.DeepSeekV3, marked.DeepSeekV31, marked.KimiK2, marked.Granite, marked.Granite20b, marked.Phi4Mini,
    pythonic.Lfm2, pythonic.Llama4Pythonic, pythonic.Pythonic, formats.Hermes, formats.Llama3Json,
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
