"""Names of files, tasks and methods that options and artifacts have in common.

Commands import this module to parse their options. It imports nothing that reads an artifact, so they start fast.
"""

from __future__ import annotations

from pathlib import Path

MANIFEST_FILE = "manifest.json"  # file name of an artifact's manifest
TOKENIZER_FILE, TEMPLATE_DIR = "tokenizer.json", "additional_chat_templates"  # names in a model's folder
GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
TASKS = (EMBED, CLASSIFY)  # tasks of models that pool
LAST, CLS, MEAN = "last", "cls", "mean"
POOLING_KINDS = (LAST, CLS, MEAN)
DRAFT_MODEL, EAGLE, MTP = "draft_model", "eagle3", "mtp"  # methods of drafting, by vLLM's names
MAX_RANKS = 1024
NCCL = "nccl"  # the language of kernels that are calls of NCCL


def is_artifact(folder: Path) -> bool:
    """Whether a folder is an artifact: it has a manifest."""
    return (folder / MANIFEST_FILE).is_file()
