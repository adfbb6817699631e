"""Rows of the aten table against torch itself: each case is a few lines of torch in a small module, traced and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from llmc.diagnostics import Diagnostic
from llmc.frontend.aten_math import Lowering, softplus
from llmc.frontend.aten_table import TABLE
from llmc.frontend.convert import convert
from llmc.frontend.export import Exported
from llmc.ir import text
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.verify import verify

Fn = Callable[..., torch.Tensor]


# x: f32 [1, T, 12]; p: positions i64 [1, T]; each answers [1, T, n]
def rotated(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Pairs of columns as complex numbers, turned by the position."""
    angles = torch.stack([p * f for f in (1.0, 0.5, 0.25, 0.1, 0.01, 0.001)], -1)
    y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.complex(angles.cos(), angles.sin())
    return torch.view_as_real(y.unsqueeze(1)).flatten(3).flatten(1, 2)


CASES: dict[str, Fn] = {
    "complex": rotated,
    "broadcast_to": lambda x, p: x + p[..., None].broadcast_to(x.shape),
    "arith": lambda x, p: (1.5 - x) * 2 / (x * x + 1) + torch.add(x, x, alpha=3) - torch.rsub(x, 2),
    "synonyms": lambda x, p: torch.multiply(x, x).subtract(x).divide(x + 9) + torch.true_divide(x, 3.0),
    "divide_ints": lambda x, p: x + (p / 7)[..., None] + torch.div(p, 3, rounding_mode="floor")[..., None],
    "powers": lambda x, p: x**2 + (x * x + 1) ** 0.5 + (x * x + 1) ** -0.5 + x.abs() ** 1.7 + (x + 9) ** -1,
    "compare": lambda x, p: torch.where(x > 0.3, x, 0.0) + torch.where((p[..., None] <= 2) & (x != 0), 1.0, x),
    "masked": lambda x, p: x.masked_fill(x < 0, float("-inf")).softmax(-1) + x.masked_fill(~(x < 0), 0.5),
    "clamp": lambda x, p: x.clamp(-0.5, 0.5) + x.clamp(min=0) + torch.minimum(x, x * 2) + torch.max(x, -x),
    "unary": lambda x, p: x.sin() + x.cos() + x.tanh() + x.exp() + x.sigmoid() + x.erf() + x.abs().log1p().expm1(),
    "softplus": lambda x, p: torch.nn.functional.softplus(x * 30) + torch.nn.functional.softplus(x),
    "rounded_once": lambda x, p: torch.cat(
        [torch.nn.functional.softplus(x.bfloat16()), x.bfloat16().expm1(), x.abs().bfloat16().log1p()], -1
    ).float(),
    "gelus": lambda x, p: torch.nn.functional.gelu(x) + torch.nn.functional.gelu(x, approximate="tanh"),
    "reduce": lambda x, p: x - x.mean(-1, True) + x.sum((-1,), True) + x.amax(-1, True) + x.max(-1)[0][..., None],
    "vector_norms": lambda x, p: x / x.norm(p=1, dim=-1, keepdim=True) + torch.norm(x, p=2.0, dim=-1, keepdim=True),
    "top": lambda x, p: x.scatter(-1, x.topk(3)[1], 2.0) + x.gather(-1, x.topk(12)[1]),
    "argmax": lambda x, p: x + x.argmax(-1, keepdim=True),
    "cumsum": lambda x, p: x.cumsum(-1),
    "shapes": lambda x, p: x.view(1, -1, 3, 4).transpose(2, 3).permute(0, 1, 3, 2).flatten(2).unsqueeze(0).squeeze(0),
    "select": lambda x, p: x[..., 3:4] + x[..., -2:].sum(-1, True) + x[..., 1::5].amin(-1, True) - x[..., -1:],
    "chunks": lambda x, p: torch.cat([*x.chunk(5, -1), *x.split(5, -1), *x.split([1, 11], -1)], -1),
    "dtypes": lambda x, p: torch.cat([x.bfloat16(), x.relu()], -1) + torch.stack([x, x.half()], -1).flatten(-2),
    "unbind": lambda x, p: torch.stack(x.view(1, -1, 3, 4).unbind(2), -1).flatten(2),
    "repeat": lambda x, p: x.repeat_interleave(2, dim=-1),
    "expand": lambda x, p: x[..., None].expand(-1, -1, -1, 3).reshape(1, -1, 36),
    "products": lambda x, p: torch.matmul(x, torch.matmul(x.mT, x)) + (x[0] @ (x[0].T @ x[0])),
    "norms": lambda x, p: torch.nn.functional.layer_norm(x, (12,)) + torch.nn.functional.rms_norm(x, (12,), eps=1e-5),
    "constants": lambda x, p: x + torch.ones_like(x) - torch.zeros_like(x) * 3 + torch.full_like(x, 2.5),
    "ranges": lambda x, p: x + torch.arange(12, device=x.device) + torch.arange(2, 14, device=x.device, dtype=x.dtype),
    "counted": lambda x, p: x + torch.arange(x.shape[1], device=x.device)[:, None] / 8,
    "in_place": lambda x, p: (x * 2).mul_(3).add_(x),
    "slices_written": lambda x, p: halves_written(x),
    "copies_written": lambda x, p: copies_written(x),
    "pieces_written": lambda x, p: pieces_written(x),
    "same_written": lambda x, p: same_written(x),
    "copies_kept": lambda x, p: copies_kept(x),
    "masked_write": lambda x, p: torch.clone(x).index_put_((x > 0,), x.amax()),
    "clipped": lambda x, p: x.clip(-0.5, 0.7) + torch.nn.functional.relu6(x * 9) + torch.nn.functional.hardtanh(x),
    "leaky": lambda x, p: torch.nn.functional.leaky_relu(x) + torch.nn.functional.leaky_relu(x, 0.2),
    "tiled": lambda x, p: x.repeat(1, 1, 2) + x[..., :1].expand_as(x).repeat(1, 1, 2),
    "casts": lambda x, p: x.to(torch.bfloat16).float() + p.to(x.dtype)[..., None] + x.long().type_as(x),
    "doubles": lambda x, p: (x.double() * 1e-9).float() * 1e9,
}  # fmt: skip


def halves_written(x: torch.Tensor) -> torch.Tensor:
    """As MLA puts its keys together: an empty tensor, filled by slices; then one slice is changed in place."""
    y = x.new_empty(*x.shape[:-1], 14)
    y[..., :12].copy_(x * 2)
    y[..., 12:].copy_(x[..., 3:4])
    y[..., 2:-5].mul_(3)
    return y[..., :12] + y[..., 2:]


def copies_written(x: torch.Tensor) -> torch.Tensor:
    """A slice of what may be a copy is changed in place, as are the streams of Gemma 3n; one is read before."""
    y = (x * 2).contiguous().type_as(x)
    first = y[..., :1].clone()
    y[..., 1:] += first
    return y + first


def pieces_written(x: torch.Tensor) -> torch.Tensor:
    """Pieces of a split tensor that is not read again are changed in place, as models scale queries."""
    y = x * 2
    a, b = y.split((4, 8), -1)
    before = b * 1
    b.mul_(3)
    first, second = b.chunk(2, -1)
    second.add_(1)
    return torch.cat((a, first, second), -1) + before.repeat(1, 1, 2)[..., :12]


def same_written(x: torch.Tensor) -> torch.Tensor:
    """What is changed in place would be a copy if its layout or its dtype differed."""
    y = x * 2
    y.contiguous().to(x.dtype).mul_(2)
    return y


def copies_kept(x: torch.Tensor) -> torch.Tensor:
    """What is changed in place is a copy of what is read again."""
    y = x * 2
    a = y.transpose(1, 2).contiguous()
    a.mul_(3)
    b = y.to(torch.float64)
    b.mul_(5)
    return y + a.transpose(1, 2) + b.float()


class Small(torch.nn.Module):
    """A module with a causal model's signature whose logits are a function of an embedding and the positions."""

    def __init__(self, fn: Fn):
        super().__init__()
        self.fn = fn
        self.embed = torch.nn.Embedding(320, 12)

    def forward(self, input_ids: Any, position_ids: Any, logits_to_keep: Any) -> torch.Tensor:
        return self.fn(self.embed(input_ids), position_ids)[:, logits_to_keep, :]


def exported(fn: Fn | torch.nn.Module) -> tuple[Small, Exported]:
    torch.manual_seed(0)
    module = fn if isinstance(fn, Small) else Small(fn)
    ids = torch.arange(24)[None]
    tokens, rows = torch.export.Dim("T", min=1, max=64), torch.export.Dim("R", min=1, max=8)
    with torch.no_grad():
        program = torch.export.export(
            module, (), strict=False,
            kwargs={"input_ids": ids, "position_ids": ids.clone(), "logits_to_keep": torch.arange(3)},
            dynamic_shapes={"input_ids": {1: tokens}, "position_ids": {1: tokens}, "logits_to_keep": {0: rows}},
        )  # fmt: skip
    return module, Exported(module, program, {}, 64, 8)


def agrees(module: Small, traced: Exported, table: Mapping[str, Lowering] = TABLE) -> None:
    """The lowered graph gives torch's numbers at another length, and its text parses back."""
    converted = convert(traced, table)
    verify(converted.module)
    assert text.show(text.parse(text.show(converted.module), OPS)) == text.show(converted.module)
    ids, last = torch.randint(0, 320, (1, 11)), torch.tensor([0, 5, 10])
    positions = torch.arange(11)[None]
    with torch.no_grad():
        want = module(ids, positions, last).numpy()[0]
    weights = {"embed.weight": module.embed.weight.detach().numpy()}
    graph = converted.module.graphs["main"]
    fixed = {"tokens": ids[0].numpy(), "positions": positions[0].numpy(), "last": last.numpy()}
    (got,) = run(graph, [weights[v.name] if v.weight else fixed[v.name] for v in graph.inputs])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_row_equals_torch(name: str) -> None:
    agrees(*exported(CASES[name]))


def test_an_op_without_a_row_names_itself_its_module_and_the_file_to_change() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    inner = Inner()

    class Outer(Small):
        def __init__(self) -> None:
            super().__init__(lambda x, p: self.block["odd"](x))
            self.block = torch.nn.ModuleDict({"odd": inner})

    with pytest.raises(Diagnostic) as e:
        convert(exported(Outer())[1])
    assert e.value.code == "E310"
    for part in ("aten.special_bessel_j0.default", "block.odd", "(Inner)", "llmc/frontend/aten_math.py", "lambda c, x"):
        assert part in str(e.value)


def test_a_row_is_one_line() -> None:
    """The remedy of the error above works: the line that docs/howto-model.md prints lowers the op correctly."""
    module, traced = exported(lambda x, p: torch.nn.functional.mish(x))
    with pytest.raises(Diagnostic, match=r"aten\.mish\.default"):
        convert(traced)
    line = '"aten.mish.default": lambda c, x: c.b.mul(x, c.b.tanh(softplus(c, x))),'
    assert line in (Path(__file__).resolve().parents[2] / "docs" / "howto-model.md").read_text()
    row = {"aten.mish.default": lambda c, x: c.b.mul(x, c.b.tanh(softplus(c, x)))}
    agrees(module, traced, MappingProxyType({**TABLE, **row}))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, p: x.topk(3, largest=False)[0], "largest of the last axis"),
        (lambda x, p: x.view(1, -1, 3, 4).index_select(2, p[0, :2]).flatten(2), "index along axis 2"),
        (lambda x, p: torch.nn.functional.layer_norm(x.view(1, -1, 3, 4), (3, 4)).flatten(2), "a norm over 2 axes"),
        (lambda x, p: x * p.shape[1], "symbolic size T"),
    ],
)
def test_arguments_that_a_row_does_not_cover(fn: Fn, words: str) -> None:
    with pytest.raises(Diagnostic, match=words) as e:
        convert(exported(fn)[1])
    assert e.value.code == "E311"


def stale(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    first = y[..., :3]
    y.mul_(2)
    return torch.cat((first, y[..., 3:]), -1)


def stale_part(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    first = y[..., :3]
    one = first[..., :1]
    first.mul_(2)
    return y + one


def view_of_a_view(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.unflatten(-1, (3, 4))[..., :3].mul_(2)
    return y


def gaps(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[..., ::2].mul_(2)
    return y


def piece(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    a, _ = y.split((4, 8), -1)
    a.mul_(2)
    return y


def piece_read_before(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 1
    a, b = y.chunk(2, -1)
    y.mul_(2)
    return torch.cat((a, b), -1)


def piece_of_a_weight(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    a, b = x.split((4, 8), -1)
    a.mul_(2)
    return torch.cat((a, b), -1) + x


VIEWS = (stale, stale_part, view_of_a_view, gaps, piece, piece_read_before, piece_of_a_weight)


@pytest.mark.parametrize("fn", VIEWS, ids=lambda f: f.__name__)
def test_writing_under_a_view_is_refused(fn: Fn) -> None:
    with pytest.raises(Diagnostic, match="it writes to a view") as e:
        convert(exported(fn)[1])
    assert e.value.code == "E311"


def test_names_are_spelled_as_torch_spells_them() -> None:
    """A row whose overload does not exist would never be used."""
    for name in TABLE:
        space, op, overload = name.split(".")
        if space == "aten":
            assert overload in getattr(torch.ops.aten, op).overloads(), name
