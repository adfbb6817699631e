"""Rotary embeddings in the trace: each rope module becomes one op, and its frequencies a computed buffer."""

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmc.diagnostics import Diagnostic

Plan = tuple[str, float, str, torch.dtype | None]  # buffer, scaling, layout, dtype of tables (None: x's)

ROPE_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))

NUMBERS = frozenset(
    ("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
     "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor")
)  # fmt: skip

# How a module arranges h frequencies in the columns of its tables.
LAYOUTS: types.MappingProxyType[str, Callable[[Tensor], Tensor]] = types.MappingProxyType(
    {"half": lambda a: a, "twice": lambda a: torch.cat((a, a), -1), "pairs": lambda a: a.repeat_interleave(2, -1)}
)
PROBED_POSITIONS = 4  # positions at which a module's own tables are evaluated
POSITION_AXES = 3  # position ids per token in models that read images, unless the module has more sections
COMPLEX = "complex"  # one complex table cos + i sin of half width


def check_config(config: dict[str, Any]) -> None:
    """Raise Diagnostic E306 if the parsed config.json names a rope type that transformers does not have."""
    for name in _rope_types(config.get("rope_scaling")) + _rope_types(config.get("rope_parameters")):
        if name not in ROPE_TYPES:
            raise Diagnostic(
                "E306", f"config.json: rope type {name!r} is unknown", f"known types: {', '.join(ROPE_TYPES)}"
            )


def check_parameters(entry: Any) -> None:
    """Check the `rope_parameters` of a loaded config, which may have entries by kind of layer.

    Raises Diagnostic E306 for an older rope type that this model does not have, E302 for a text instead of a number.
    """
    if not isinstance(entry, dict):
        return
    kind = entry.get("rope_type")
    if isinstance(kind, str) and kind not in ROPE_TYPES:
        cause = f"config.json: this model_type has no rope type {kind!r}"
        raise Diagnostic("E306", cause, f"known types: {', '.join(ROPE_TYPES)}")
    for key, value in entry.items():
        if key in NUMBERS and isinstance(value, str | bool | list | dict):
            raise Diagnostic("E302", f"config.json: {key} of the rope is {value!r:.60}, not a number", "correct it")
        check_parameters(value)


def _rope_types(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return []
    names = [str(t) for k in ("rope_type", "type") if (t := entry.get(k)) is not None]
    for value in entry.values():
        names += _rope_types(value)
    # "su" and "mrope" are older names, which transformers itself maps to longrope and default.
    return [{"su": "longrope", "mrope": "default"}.get(t, t) for t in names]


def rope_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (path, module) for the model's rotary embedding modules."""
    for name, m in model.named_modules():
        if "RotaryEmbedding" in type(m).__name__ and hasattr(m, "rope_type"):
            yield name, m


def patch(model: torch.nn.Module, max_positions: int) -> dict[str, Tensor]:
    """Replace the forward of each rope module by `llmc::rope_tables`; returns the frequencies by buffer name.

    longrope has two sets of frequencies, and transformers chooses by the longest sequence of a batch. Here the choice
    is made once: the short set if `max_positions` fits the original length, else the long one. dynamic equals default
    up to the config's max_position_embeddings. Beyond that, frequencies would change while a sequence grows and no
    longer match the keys in the cache, so that raises Diagnostic E306.
    """
    computed: dict[str, Tensor] = {}
    for path, module in rope_modules(model):
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        plans = {}
        try:
            for layer_type, kind in kinds.items():
                prefix = f"{layer_type}_" if layer_type else ""
                freq = _frequencies(module, prefix, layer_type, str(kind), max_positions)
                scaling = _scaling(module, prefix, max_positions)
                near = _frequencies(module, prefix, layer_type, str(kind), PROBED_POSITIONS)
                layout, dtype, order = _layout(module, prefix, layer_type, near, path)
                computed[f"{path}.{prefix}inv_freq"] = freq if order is None else freq[order]
                plans[layer_type] = (f"{prefix}inv_freq", scaling, layout, dtype)
            module.forward = _forward(module, plans)
        except Diagnostic as e:
            module.forward = _refusal(e)
    return computed


def _refusal(error: Diagnostic) -> Callable[..., Any]:
    """Return a forward that raises `error`; it never runs in modules that text does not use, such as vision towers."""

    def forward(*_: Any, **__: Any) -> Any:
        raise error

    return forward


def _forward(module: torch.nn.Module, plans: dict[str | None, Plan]) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        name, scaling, layout, dtype = plans[layer_type]
        position_ids = _one_axis(position_ids, type(module).__name__)
        if layout == COMPLEX:
            freq = getattr(module, name)
            return torch.complex(*torch.ops.llmc.rope_tables(freq, position_ids, scaling, "half", torch.float32))
        return torch.ops.llmc.rope_tables(getattr(module, name), position_ids, scaling, layout, dtype or x.dtype)

    return forward


def _one_axis(positions: Tensor, name: str) -> Tensor:
    """Return positions [1, T] of positions [axes, 1, T], which are the same on all axes for text.

    They are the same if all axes share one row of memory; otherwise raises Diagnostic E305.
    """
    if positions.dim() == 2:
        return positions
    if positions.dim() != 3 or positions.stride(0) != 0:
        cause = f"{name} rotates by positions [{', '.join(map(str, positions.shape))}], which may differ by axis"
        raise Diagnostic("E305", cause, "only positions that all axes share, as those of text, are supported")
    return positions[0]


def _frequencies(module: Any, prefix: str, layer_type: str | None, kind: str, max_positions: int) -> Tensor:
    """Return the frequencies of a rope module, fixed for `max_positions`; raises Diagnostic E306."""
    extra: dict[str, Any] = {"layer_type": layer_type} if layer_type else {}
    if kind == "dynamic" and max_positions > (limit := module.config.max_position_embeddings):
        raise Diagnostic(
            "E306",
            f"rope type dynamic changes its frequencies beyond {limit} positions; {max_positions} were requested",
            f"compile for at most {limit} positions",
        )
    if kind not in ROPE_TYPES:
        raise Diagnostic("E306", f"rope type {kind!r} is unknown", f"known types: {', '.join(ROPE_TYPES)}")
    if kind == "longrope":
        return ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=max_positions, **extra)[0]
    with torch.device("cpu"):  # let the module compute them, from whichever config entry it uses
        return getattr(type(module)(module.config), f"{prefix}inv_freq")


def _scaling(module: Any, prefix: str, max_positions: int) -> float:
    """Return the factor of the tables. longrope of Phi-3.5-MoE has two factors, for short and for long sequences,
    chosen as in `patch`. For long sequences, transformers' Phi-3.5-MoE uses the frequencies of short ones; its
    publisher's code, and llmc, use those of long ones.
    """
    rope = getattr(module.config, "rope_parameters", None) or {}
    if not {"short_mscale", "long_mscale"} <= rope.keys():
        return float(getattr(module, f"{prefix}attention_scaling"))
    long = max_positions > rope["original_max_position_embeddings"]
    return float(rope["long_mscale" if long else "short_mscale"])


def _layout(
    module: torch.nn.Module, prefix: str, layer_type: str | None, freq: Tensor, path: str
) -> tuple[str, torch.dtype | None, Tensor | None]:
    """Run the module's forward on a few positions to find how it makes its tables.

    Returns the layout, the dtype of the tables (None: that of x), and the order in which the tables use the stored
    frequencies (None: the stored order). ERNIE 4.5 VL stores the frequencies of height and width separately, and
    alternates them in its tables. `freq` are the frequencies for these few positions.
    """
    if not len(freq):
        cause = f"{path}: {type(module).__name__} has no frequencies: fewer than 2 columns of a head are rotated"
        raise Diagnostic("E306", cause, "correct head_dim, or partial_rotary_factor (rotary_pct), in config.json")
    if not freq.isfinite().all():
        cause = f"{path}: {type(module).__name__} has frequencies that are not finite"
        raise Diagnostic("E306", cause, "correct rope_theta and the factors of the rope in config.json")
    try:
        tables, low = _probe(module, prefix, layer_type, freq)
    except (TypeError, ValueError, IndexError, RuntimeError):  # it needs more than positions
        tables = low = None
    angles = torch.arange(PROBED_POSITIONS)[None, :, None].float() * freq
    scaling = _scaling(module, prefix, PROBED_POSITIONS)
    if isinstance(tables, Tensor) and tables.is_complex() and tables.shape == angles.shape:
        if torch.allclose(tables, torch.complex(angles.cos(), angles.sin()) * scaling):
            return COMPLEX, None, None
    candidates = LAYOUTS if isinstance(tables, tuple) else {}
    for layout, spread in candidates.items():
        (cos, sin), columns = tables, spread(torch.arange(len(freq)))
        if cos.shape != (*angles.shape[:2], len(columns)):
            continue
        for order in (None, _order(angles.sin() * scaling, sin, columns)):
            turned = spread(angles if order is None else angles[..., order])
            if torch.allclose(turned.cos() * scaling, cos) and torch.allclose(turned.sin() * scaling, sin):
                dtype = None if low[0].dtype == torch.bfloat16 else low[0].dtype
                return layout, dtype, order
    raise Diagnostic(
        "E306",
        f"{path}: {type(module).__name__} makes rotary tables in an unknown layout",
        "add its layout to LAYOUTS in llmc/frontend/rope_interface.py, and to `rope_tables` in "
        "llmc/frontend/aten_table.py",
    )


def _order(known: Tensor, table: Tensor, columns: Tensor) -> Tensor:
    """Return the index of the stored frequency that each frequency of a table of sines is.

    known [1, n, h] are the sines of each frequency; column j of table [1, n, w] has the table's frequency columns[j].
    """
    first = torch.stack([(columns == i).nonzero()[0, 0] for i in range(known.shape[-1])])
    sines, target = known[0, 1:, :, None], table[0, 1:, None, first]  # at position 0, all are zero
    return ((sines - target).abs() / sines.abs()).amax(0).argmin(0)


def _probe(module: torch.nn.Module, prefix: str, layer_type: str | None, freq: Tensor) -> tuple[Any, Any]:
    """Return the tables of the module's own forward for the first positions, in float32 and in bfloat16."""
    probe = copy.copy(module)
    probe._buffers = dict(module._buffers)
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        if name in probe._buffers:
            probe._buffers[name] = freq
    positions = torch.arange(PROBED_POSITIONS)[None]
    args = (layer_type,) if layer_type else ()

    def tables(positions: Tensor, dtype: torch.dtype) -> Any:
        return type(module).forward(probe, torch.zeros(1, dtype=dtype), positions, *args)

    with torch.no_grad(), torch.device("cpu"):
        try:
            low = tables(positions, torch.bfloat16)
        except IndexError:  # positions of several axes: time, height and width, for example
            sections = getattr(module, "mrope_section", ())
            count = len(sections.get(layer_type, ()) if isinstance(sections, dict) else sections)
            positions = positions.expand(count or POSITION_AXES, 1, PROBED_POSITIONS)
            low = tables(positions, torch.bfloat16)
        return tables(positions, torch.float32), low
