"""Reads the weights of a traced model from its folder, by name and row range. Opening checks them all, loading none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.frontend.safetensors_reader import NUMPY, STORED, TensorFiles, some
from llmc.frontend.trace_model import Traced, WeightInfo
from llmc.frontend.truncate import beyond
from llmc.frontend.weight_mapping import resolve
from llmc.frontend.weight_parts import Part

# Tensors that old versions of transformers saved although they are computed: rotary frequencies, and causal masks with
# their fill value. The latter share names with biases and are recognized by their shapes.
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
MASK = re.compile(r"(^|\.)(attn|attention)\.((masked_)?bias|causal_mask)$")


class Checkpoint:
    """Reads the weights of @main. Use it as a context manager, or call `close`.

    Opening reads only headers and raises Diagnostic E320-E327: missing or damaged files, a wrong index, tensors that
    are missing, unexpected, of the wrong shape or not floating point, and tied weights that differ.
    """

    def __init__(self, traced: Traced, folder: Path | None = None):
        """Open and check the weights; `folder` defaults to the folder of the traced model."""
        self.traced = traced
        self._tensors = TensorFiles(folder or traced.source.folder)
        stored = self._tensors.tensors
        if traced.facts.layers:
            other = beyond(traced.model, traced.facts.layers[0])
            stored = MappingProxyType({name: t for name, t in stored.items() if not other(name)})
        parts = resolve(traced.model, stored)
        self._parts = self._located(parts)
        self._check_extra(parts)
        for name, part in self._parts.items():
            _check_shape(traced.weights[name], part)
            _check_dtypes(name, part)
        self._check_tied(parts)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._tensors.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weight inputs of @main, including computed buffers."""
        return tuple(self.traced.weights)

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, for hashing."""
        return self._tensors.files

    def where(self, name: str) -> str:
        """Describe which stored tensors a weight comes from, as file:name."""
        if name in self.traced.buffers:
            return "computed"
        stored = list(self._parts[name].stored())
        return f"{stored[0].file.name}:{stored[0].name}" + (f" and {len(stored) - 1} more" if len(stored) > 1 else "")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight in the graph."""
        return tuple(int(d.const or 0) for d in self.traced.weights[name].type.shape)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Return rows of the first axis (all by default) as a new array in the weight's dtype in the graph.

        Only these rows are read from disk, unless the weight is stored transposed. Raises KeyError for an unknown name
        and ValueError for a slice with a step.
        """
        want = NUMPY[self.traced.weights[name].type.dtype]
        shape = self.shape(name)
        start, stop, step = (rows or slice(None)).indices(shape[0] if shape else 1)
        if step != 1:
            raise ValueError(f"rows of {name} with step {step}: only contiguous rows can be read")
        if name in self.traced.buffers:
            value = np.asarray(self.traced.buffers[name])
            return np.array(value[start:stop] if shape else value, dtype=want)
        return self._parts[name].read(self._tensors, start, max(start, stop)).astype(want, copy=False)

    def _located(self, parts: Mapping[str, Part]) -> Mapping[str, Part]:
        """Find the part of each stored weight, under its own name or the name of a weight tied to it."""
        aliases: dict[str, list[str]] = {}
        for other, owner in self.traced.tied.items():
            aliases.setdefault(owner, []).append(other)
        found: dict[str, Part] = {}
        missing = []
        for name in self.traced.weights:
            if name in self.traced.buffers:
                continue
            at = next((n for n in (name, *aliases.get(name, ())) if n in parts), None)
            if at is None:
                missing.append(name)
            else:
                found[name] = parts[at]
        if missing:
            have = len(self._tensors.tensors)
            remedy = "fetch the whole checkpoint; config.json and weights must be of one model"
            if missing == [f"{_head(self.traced.model)}.weight"]:
                remedy += "; where the head is the embedding: set tie_word_embeddings to true"
            raise Diagnostic(
                "E323",
                f"{self._tensors.folder} lacks tensors that {self.traced.facts.architecture} needs: {some(missing)} "
                f"(the files hold {have} tensors)",
                remedy,
            )
        return MappingProxyType(found)

    def _check_extra(self, parts: Mapping[str, Part]) -> None:
        """Raise Diagnostic E324 for stored tensors that the model does not use, except known harmless ones."""
        model = self.traced.model
        ignored = [HARMLESS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
        known = set(model.state_dict()) | set(self.traced.tied)
        extra = sorted(
            n for n, p in parts.items() if n not in known and not any(r.search(n) for r in ignored) and not _mask(n, p)
        )
        if extra:
            raise Diagnostic(
                "E324",
                f"{self._tensors.folder} holds tensors that {self.traced.facts.architecture} does not use: "
                f"{some(extra)}",
                "config.json and weights must be of one model; check its sizes and options",
            )

    def _check_tied(self, parts: Mapping[str, Part]) -> None:
        """Compare a sample of rows of weights that config.json ties but the checkpoint stores twice."""
        for other, owner in self.traced.tied.items():
            if other not in parts or owner not in parts or parts[other] is parts[owner]:
                continue
            a, b = parts[owner], parts[other]
            if a.shape != b.shape or not all(
                np.array_equal(a.read(self._tensors, r, r + 1), b.read(self._tensors, r, r + 1))
                for r in _sample(a.shape[0])
            ):
                raise Diagnostic(
                    "E327",
                    f"config.json ties {other} to {owner}, but the checkpoint stores two different tensors",
                    "set tie_word_embeddings to false in config.json",
                )


def _head(model: Any) -> str:
    """Module path of the output projection, or "" if the model does not report one."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")


def _mask(name: str, part: Part) -> bool:
    """Whether a tensor is a causal mask or a mask's fill value."""
    s = part.shape
    return MASK.search(name) is not None and (s in ((), (1,)) or (len(s) == 4 and s[0] * s[1] == 1 and s[2] == s[3]))


def _sample(rows: int) -> Iterable[int]:
    return sorted({i * (rows - 1) // 15 for i in range(16)})


def _check_shape(weight: WeightInfo, part: Part) -> None:
    want = tuple(d.const for d in weight.type.shape)
    if part.shape != want:
        raise Diagnostic(
            "E325",
            f"{weight.name} is {list(part.shape)} in the checkpoint and {list(want)} by config.json",
            "config.json and weights must be of one model; check hidden_size, vocab_size and the head counts",
            loc=weight.module,
        )


def _check_dtypes(name: str, part: Part) -> None:
    for t in part.stored():
        if t.dtype not in STORED:
            raise Diagnostic(
                "E326",
                f"{name} is stored as {t.dtype} in {t.file.name}; float weights are wanted ({', '.join(STORED)})",
                "compile the original unquantised checkpoint",
            )
