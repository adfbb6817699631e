"""All formats of calls that are known, under the names that vLLM has for their parsers; it reads no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from llmc_runtime.server.tools import formats, marked, pythonic, xml
from llmc_runtime.server.tools.calls import CallFormat

# Of one name, and of those that fit a template, the first.
FORMATS: Sequence[type[CallFormat]] = (
    formats.MistralArgs, formats.Mistral, formats.OpenAI, xml.Qwen3Coder, xml.SeedOss, xml.MiniMaxM2, xml.Glm45,
    marked.DeepSeekV3, marked.DeepSeekV31, marked.KimiK2, marked.Granite, marked.Granite20b, marked.Phi4Mini,
    pythonic.Lfm2, pythonic.Llama4Pythonic, pythonic.Pythonic, formats.Hermes, formats.Llama3Json,
)  # fmt: skip
# Other names of theirs.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_xml": "qwen3_coder",
        "mimo": "qwen3_coder",
        "llama4_json": "llama3_json",
        "granite4": "hermes",
        "glm47": "glm45",
    }
)
