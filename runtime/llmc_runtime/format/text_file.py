"""Text files that a user names in a command."""

from __future__ import annotations

from pathlib import Path

from llmc_runtime.format.size_text import size_text


def read_text(path: str | Path, max_bytes: int) -> str:
    """Return the text of a file or a pipe in UTF-8.

    Raises ValueError, whose text is the reason, if it cannot be read, has more than `max_bytes` bytes or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"it has more than {size_text(max_bytes)}")
        return data.decode("utf-8")
    except OSError as e:
        raise ValueError(e.strerror) from e
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not UTF-8 text ({e.reason} at byte {e.start})") from e
