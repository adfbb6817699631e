"""How a weight is assembled from stored tensors: stacks, joins, swaps and cuts that can be read by row range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmc.frontend.safetensors_reader import Stored, TensorFiles


class Part(Protocol):
    """A weight or a piece of one: a shape, and rows of its first axis on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray: ...

    def stored(self) -> Iterator[Stored]: ...


@dataclass(frozen=True)
class Leaf:
    """A stored tensor, unchanged."""

    tensor: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the assembled tensor."""
        return self.tensor.shape

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis."""
        return files.read(self.tensor, start, stop)

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that this is made of."""
        yield self.tensor


@dataclass(frozen=True)
class Stack:
    """Parts of one shape along a new first axis, such as experts."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the assembled tensor."""
        return (len(self.parts), *self.parts[0].shape)

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis."""
        return np.stack([p.read(files, 0, p.shape[0]) for p in self.parts[start:stop]])

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that this is made of."""
        for p in self.parts:
            yield from p.stored()


@dataclass(frozen=True)
class Join:
    """Parts concatenated along an axis, such as gate and up."""

    parts: tuple[Part, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the assembled tensor."""
        total = sum(p.shape[self.axis] for p in self.parts)
        first = self.parts[0].shape
        return (*first[: self.axis], total, *first[self.axis + 1 :])

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis."""
        if self.axis:
            return np.concatenate([p.read(files, start, stop) for p in self.parts], self.axis)
        out, at = [], 0
        for p in self.parts:
            lo, hi = max(start - at, 0), min(stop - at, p.shape[0])
            if lo < hi:
                out.append(p.read(files, lo, hi))
            at += p.shape[0]
        return np.concatenate(out) if out else np.empty((0, *self.shape[1:]))

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that this is made of."""
        for p in self.parts:
            yield from p.stored()


@dataclass(frozen=True)
class Swap:
    """A part with two axes exchanged. If the first axis is exchanged, reading any rows reads the whole part."""

    part: Part
    a: int
    b: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the assembled tensor."""
        s = list(self.part.shape)
        s[self.a], s[self.b] = s[self.b], s[self.a]
        return tuple(s)

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis."""
        if self.a and self.b:
            return np.swapaxes(self.part.read(files, start, stop), self.a, self.b)
        whole = np.swapaxes(self.part.read(files, 0, self.part.shape[0]), self.a, self.b)
        return np.ascontiguousarray(whole[start:stop])

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that this is made of."""
        yield from self.part.stored()


@dataclass(frozen=True)
class Cut:
    """A range of a part along an axis, such as one of several weights stored as one tensor."""

    part: Part
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the assembled tensor."""
        s = list(self.part.shape)
        s[self.axis] = self.stop - self.start
        return tuple(s)

    def read(self, files: TensorFiles, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis."""
        if self.axis == 0:
            return self.part.read(files, self.start + start, self.start + stop)
        rows = self.part.read(files, start, stop)
        return np.ascontiguousarray(rows[(np.s_[:],) * self.axis + (np.s_[self.start : self.stop],)])

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that this is made of."""
        yield from self.part.stored()


def cuts(part: Part, count: int, axis: int) -> Sequence[Part]:
    """Split a part into `count` pieces of equal size along an axis as torch.chunk does; the last may be shorter."""
    size = -(-part.shape[axis] // count)
    whole = part.shape[axis]
    return [Cut(part, axis, i * size, min((i + 1) * size, whole)) for i in range(count) if i * size < whole]
