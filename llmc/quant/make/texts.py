"""Calibration texts: reads a file, tokenises it, and draws windows of tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from llmc.diagnostics import Diagnostic
from llmc.frontend.model_folder import is_regular
from llmc.frontend.tokenizer_files import check_tokenizer, without_tokenizer
from llmc.text_lines import SUFFIX, document

MAX_BYTES = 1 << 30
FORM = "give UTF-8 text, or JSON lines with a field text"


def read_texts(path: Path) -> list[str]:
    """Read the documents of a file: the lines of NAME.jsonl, or one document.

    Raises Diagnostic E353 if the file is missing, empty, too large or not text.
    """
    try:
        if not is_regular(path):
            raise ValueError("it is not a file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"it has {size} bytes, over the limit of {MAX_BYTES}")
        data = path.read_bytes()
        if b"\0" in data:
            raise ValueError(f"it has a NUL byte at {data.index(0)}")
        text = data.decode("utf-8-sig")
        lines = enumerate(text.split("\n"), 1)
        texts = [document(line, i) for i, line in lines if line.strip()] if path.suffix == SUFFIX else [text]
    except (OSError, ValueError) as e:
        raise Diagnostic("E353", f"{path} cannot be read as text: {e}", FORM) from None
    if not any(t.strip() for t in texts):
        raise Diagnostic("E353", f"{path} contains no text", FORM)
    return texts


def windows(texts: list[str], folder: Path, samples: int, length: int, seed: int) -> Tensor:
    """Return tokens [at most `samples`, `length`]: documents in an order drawn by `seed`, joined and cut into windows.

    Raises Diagnostic E353 if the texts do not fill one window, E309 if the folder has no usable tokenizer.json.
    """
    tokenizer = _tokenizer(folder)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    ids: list[int] = []
    for i in order:
        if len(ids) >= samples * length:
            break
        ids += tokenizer.encode(texts[i]).ids
    count = min(samples, len(ids) // length)
    if not count:
        cause = f"the texts have {len(ids)} tokens, less than one window of {length}"
        raise Diagnostic("E353", cause, "use more text, or a smaller --length")
    return torch.tensor(ids[: count * length]).reshape(count, length)


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = check_tokenizer(folder)
    if tokenizer is None:
        raise Diagnostic("E309", without_tokenizer(folder), "calibration needs tokenizer.json")
    return tokenizer
