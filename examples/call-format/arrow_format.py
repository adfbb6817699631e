"""A format of tool calls from an outside package: <calls>call NAME => {...};</calls>."""

from llmc_runtime.call_formats import Json, JsonShape


class Arrow(JsonShape):
    """<calls>call NAME => {...};</calls>, with any number of calls between the marks."""

    name = "arrow"
    markers = ("<calls>", "</calls>")  # texts that may be special tokens; the first one starts calls
    between = None  # further calls need no mark of their own
    call = ("call ", Json.NAME, " => ", Json.ARGUMENTS, ";")
    end = "</calls>"
