"""Pooling: how a model that does not generate turns a prompt into numbers, as an artifact's manifest states it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import Fields, a_text, damaged
from llmc_runtime.format.names import POOLING_KINDS, TASKS
from llmc_runtime.format.record import Record, stored

ACTIVATIONS = ("none", "sigmoid", "softmax")
MAX_WIDTH = 1 << 16
POOLED = "pooled"  # the output of programs


@dataclass(frozen=True)
class Pooling(Record):
    """The results of a model that pools, as its programs return them: the output POOLED, f32[R, width].

    task:        "embed" (a vector of hidden states) or "classify" (a logit per label)
    kind:        what is pooled: the hidden state of the "last" token, of the first ("cls"), or the "mean" of all
    width:       the size of the hidden states, or the number of labels
    normalize:   embeddings are divided by their length
    activation:  of logits: "none", "sigmoid" or "softmax"
    whole:       a prompt runs in a single step, and shares no prefix: the result depends on all of its tokens
    segments:    kinds of tokens: the ids of segment i are those of the vocabulary plus i times its size
    labels:      the names of the logits
    """

    task: str = stored(Fields.text)
    kind: str = stored(Fields.text)
    width: int = stored(Fields.integer, low=1, high=MAX_WIDTH)
    normalize: bool = stored(Fields.flag, False, absent=MISSING)
    activation: str = stored(Fields.text, "none", absent=MISSING)
    whole: bool = stored(Fields.flag, False, absent=MISSING)
    segments: int = stored(Fields.integer, 1, absent=MISSING, low=1, high=16)
    labels: tuple[str, ...] = stored(Fields.list, (), absent=MISSING, item=a_text, cap=MAX_WIDTH)

    def validate(self, where: str) -> None:
        """See Record."""
        for name, known in (("task", TASKS), ("kind", POOLING_KINDS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise damaged(where, f"unknown {name} {getattr(self, name)[:40]!r} (known: {', '.join(known)})")


def require_generation(pooling: Pooling | None, request: str) -> None:
    """Raise LlmcError E616 if the model pools. `request` names the kind of request that needs a generating model."""
    if pooling is not None:
        cause = f"{request}, and the model pools its prompts ({pooling.task})"
        raise LlmcError("E616", cause, "use an artifact of a model that generates text")
