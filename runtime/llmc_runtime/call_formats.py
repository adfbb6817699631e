"""The public interface for packages that add formats of tool calls; docs/howto-runtime.md describes it."""

from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.json_shape import Json, JsonShape, UnmarkedJson
from llmc_runtime.server.tool_calls.message_shape import MessageShape
from llmc_runtime.server.tool_calls.python_shape import PythonShape
from llmc_runtime.server.tool_calls.xml_shape import XmlShape

__all__ = ["CallFormat", "Json", "JsonShape", "MessageShape", "PythonShape", "UnmarkedJson", "XmlShape"]
