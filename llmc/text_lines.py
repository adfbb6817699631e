"""Files of documents as lines of JSON, each an object with a field `text`: NAME.jsonl."""

from __future__ import annotations

import json
import re

SUFFIX = ".jsonl"
_SURROGATE = re.compile("[\ud800-\udfff]")  # json.loads joins pairs, and leaves halves, which no tokenizer encodes


def document(line: str, number: int) -> str:
    """Return the field `text` of a line; raises ValueError, which names the line by its number.

    Only a line feed ends a line: JSON's strings may hold other separators, such as U+2028.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"line {number} is not JSON: {e.msg} at column {e.colno}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"line {number} cannot be read: {str(e)[:200]}") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"line {number} has no field text")
    if _SURROGATE.search(text):
        raise ValueError(f"line {number} has half of a surrogate pair")
    return text
