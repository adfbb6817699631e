"""The model to quantise: its structure without weights, and its stored tensors by the names of its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from llmc.diagnostics import Diagnostic
from llmc.frontend.export import load_config, quiet
from llmc.frontend.model_class import auto_class
from llmc.frontend.model_folder import Source
from llmc.frontend.safetensors_reader import TensorFiles
from llmc.frontend.weight_mapping import resolve
from llmc.ir.dim import Dim
from llmc.ir.graph import Builder, Graph, Value, inputs_of
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.ir.weight_eval import Blocks, widen

FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
)
EXPERT = re.compile(r"\.experts\.\d+\.")
Slice = tuple[str, int]  # the name of a stack in its layer, and the expert


@dataclass(frozen=True)
class ExpertWeight:
    """One stored weight [n, k] of an expert: rows of a slice of a stack [experts, rows, k].

    stored: its name in the checkpoint. stack: the name of the stack in the layer. row: its first row in the slice.
    """

    stored: str
    stack: str
    expert: int
    row: int
    rows: int

    @property
    def slice(self) -> Slice:
        """The slice of the stack that has the weight; weights of one slice have the same inputs."""
        return self.stack, self.expert

    def of(self, module: Module) -> Tensor:
        """Return the weight as a view of the layer's stack."""
        return module.get_parameter(self.stack).data[self.expert, self.row : self.row + self.rows]


class ModelSource:
    """A model folder, opened. Use it as a context manager."""

    def __init__(self, source: Source) -> None:
        """Open the folder; raises Diagnostic E350 if it is quantised already, and those of unreadable checkpoints."""
        if source.config.get("quantization_config"):
            cause = f"{source.folder} is quantised already: its config.json has a quantization_config"
            raise Diagnostic("E350", cause, "quantise the original checkpoint")
        self.source = source
        self.config = load_config(source)
        auto: Any = auto_class(self.config.model_type)
        # Attention with sinks, such as gpt-oss's, has no such implementation; eager takes memory for all scores.
        attention = "sdpa" if auto._model_mapping[type(self.config)]._supports_sdpa else "eager"
        with quiet(), torch.device("meta"):
            self.model: Any = auto.from_config(
                self.config, attn_implementation=attention, experts_implementation="eager", dtype=torch.float32
            )
        self.model.eval()
        self.files = TensorFiles(source.folder)
        graph = Graph("checkpoint")
        build = Builder(graph, OPS)
        stored = {n: graph.input(n, tensor(t.dtype, *t.shape), weight=True) for n, t in self.files.tensors.items()}
        self.values: Mapping[str, Value] = resolve(self.model, stored, build, self.model.state_dict())
        self._blocks = Blocks(graph, self.files)

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return self.files.tensors[stored].shape

    def dtype(self, stored: str) -> torch.dtype:
        """Return the dtype of a stored float tensor; raises Diagnostic E326 if it is none of bf16, f16 and f32."""
        tensor = self.files.tensors[stored]
        if tensor.dtype not in FLOATS:
            cause = f"{stored} is stored as {tensor.dtype} in {tensor.file.name}; {', '.join(FLOATS)} can be quantised"
            raise Diagnostic("E326", cause, "use the original checkpoint")
        return FLOATS[tensor.dtype]

    def read(self, stored: str) -> Tensor:
        """Read a stored tensor in its dtype."""
        return to_torch(self.files.read(stored, slice(None)))

    def weight(self, name: str) -> Tensor | None:
        """Return a weight or buffer of the model in float32 by its name in the model; None if it is not stored."""
        if name not in self.values:
            return None
        value = self.values[name]
        wide = widen(self._blocks.whole(value), value.type.dtype)
        return torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32))

    def linears(self) -> dict[str, str]:
        """Map the linear modules, except the output projection, to the stored tensor of each one's weight."""
        head = self.model.get_output_embeddings()
        names = {}
        for path, module in self.model.named_modules():
            value = self.values.get(f"{path}.weight")
            if isinstance(module, torch.nn.Linear) and module is not head and value is not None and value.node is None:
                names[path] = value.name
        return names

    def experts(self) -> Iterator[str]:
        """Yield the stored weights of experts that the checkpoint holds one by one, and the model in stacks."""
        return (v.name for v in self._inputs_of_stacks() if EXPERT.search(v.name) and v.type.rank == 2)

    def stacks(self) -> Iterator[str]:
        """Yield the stored stacks [experts, n, k] of weights, which are not quantised."""
        return (v.name for v in self._inputs_of_stacks() if v.type.rank == 3)

    def _inputs_of_stacks(self) -> Iterator[Value]:
        """Yield the stored tensors of which the model's stacks are made."""
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 3 and name in self.values:
                yield from inputs_of(self.values[name])

    def experts_of(self, layer: str) -> Iterator[ExpertWeight]:
        """Yield the stored weights of a layer's experts; not those that stacks do not hold row by row."""
        for name, value in self.values.items():
            if name.startswith(f"{layer}.") and value.type.rank == 3 and value.node is not None:
                for leaf, expert, row in places(value):
                    if EXPERT.search(leaf.name) and leaf.type.rank == 2:
                        stack = name.removeprefix(f"{layer}.")
                        yield ExpertWeight(leaf.name, stack, expert, row, int(leaf.type.shape[0]))

    def plain_names(self) -> dict[str, str]:
        """Map names of the model's weights to stored tensors that hold them as they are."""
        return {name: v.name for name, v in self.values.items() if v.node is None}


def places(value: Value, expert: int = 0, row: int = 0) -> Iterator[tuple[Value, int, int]]:
    """Yield the stored matrices of a stack [experts, rows, k], the expert of each, and its first row."""
    n = value.node
    if n is None:
        yield value, expert, row
    elif n.op.name == "reshape" and value.type.shape == (Dim.of(1), *n.operands[0].type.shape):
        yield from places(n.operands[0], expert, row)
    elif n.op.name == "concat" and (axis := n.attrs["axis"] % value.type.rank) < value.type.rank - 1:
        for part in n.operands:
            yield from places(part, expert, row)
            size = int(part.type.shape[axis])
            expert, row = (expert + size, row) if axis < value.type.rank - 2 else (expert, row + size)


def to_torch(x: np.ndarray) -> Tensor:
    """Return an array as a torch tensor of the same dtype, sharing its memory."""
    if x.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
