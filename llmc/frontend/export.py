"""Builds the transformers model on the meta device and exports its graph with torch.export."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import logging
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch.export.graph_signature import InputKind

from llmc.diagnostics import Diagnostic
from llmc.frontend import (
    alibi,
    attention_interface,
    forward_inputs,
    legacy_attention,
    legacy_experts,
    legacy_methods,
    model_class,
    pooled_model,
    recurrent_interface,
    rope_interface,
    unsupported,
)
from llmc.frontend.lowering import TORCH_DTYPE
from llmc.frontend.model_folder import KNOWN_TO_WORK, Source
from llmc.frontend.pooling_files import PooledModel
from llmc.frontend.truncate import layer_lists

TOKENS, ROWS = 24, 3  # sizes of the traced example
# The keys of a config that make a model return more than logits; they do not change the logits.
OTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True)
class Exported:
    """A traced model: the meta-device module, the exported program, and its computed buffers by state-dict name.

    `num_hidden` is the number of hidden states that it returns after the logits.
    """

    model: Any
    program: torch.export.ExportedProgram
    buffers: Mapping[str, np.ndarray]
    max_tokens: int
    max_rows: int
    num_hidden: int = 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the output of transformers and torch while a model is built; stdout and stderr belong to the caller."""
    log = transformers.utils.logging
    level = log.get_verbosity()
    disabled = logging.root.manager.disable
    log.set_verbosity(log.CRITICAL)
    logging.disable(logging.CRITICAL)  # if a trace fails, torch logs and prints the whole trace
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        log.set_verbosity(level)


def load_config(source: Source, pools: bool = False) -> Any:
    """Load the transformers config of a folder, offline and without remote code; raises Diagnostic E302-E306, E313.

    The model of the config returns a dictionary with logits only, whatever config.json says about further outputs.
    `pools`: the model may be an encoder of a supported type.
    """
    name = source.model_type
    model_class.check_model_type(source, pools)
    if (why := unsupported.outside(source.config)) is not None:
        raise Diagnostic("E305", f"model_type {name!r} is not supported: {why}", KNOWN_TO_WORK)
    rope_interface.check_config(dict(source.config))
    _check_dtype(source.config)
    try:
        with quiet():
            local = {"local_files_only": True, "trust_remote_code": False}
            config = transformers.AutoConfig.from_pretrained(str(source.folder), **local)
            config = getattr(config, model_class.text_part(name) or "", config)
            text = config.get_text_config()
    except Exception as e:  # transformers raises many types; each means that it rejects this config.json
        cause = f"transformers refuses {source.folder / 'config.json'}: {' '.join(str(e).split())[:200]}"
        raise Diagnostic("E302", cause, "correct config.json") from e
    alibi.check_config(text)
    rope_interface.check_parameters(getattr(text, "rope_parameters", None))
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        why = "tokens of its prompts attend to later ones (use_bidirectional_attention)"
        raise Diagnostic("E305", f"model_type {name!r} is not supported: {why}", KNOWN_TO_WORK)
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            cause = f"model_type {name!r} is not supported: its config has no {key}, as a decoder's does"
            raise Diagnostic("E305", cause, KNOWN_TO_WORK)
    for part in (config, text):
        part.return_dict = True
        for key in OTHER_OUTPUTS:
            setattr(part, key, False)
    return config


def _check_dtype(config: Mapping[str, Any]) -> None:
    """Raise Diagnostic E302 if config.json names a dtype that torch does not have, such as "fp32" or "auto"."""
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if isinstance(name, str) and not isinstance(getattr(torch, name, None), torch.dtype):
            remedy = 'write "float32", "bfloat16" or "float16", or remove the key'
            raise Diagnostic("E302", f"config.json: {key} is {name!r:.60}, which is not a dtype of torch", remedy)


def accept(model: Any) -> None:
    """Accept every model."""


def export_model(
    config: Any,
    dtype: str,
    max_positions: int,
    max_tokens: int,
    max_rows: int,
    untied: Iterable[str] = (),
    check: Callable[[Any], None] = accept,
    aux_layers: Sequence[int] = (),
    pooled: PooledModel | None = None,
) -> Exported:
    """Trace `forward(input_ids [1,T], position_ids [1,T], logits_to_keep [R])` with dynamic T and R.

    `aux_layers` are numbers of decoder layers whose inputs [1,T,H] the trace returns after the logits. `untied` are
    parameters that config.json ties to others, and that are parameters of their own nevertheless. `check` is called
    with the model on the meta device before the trace, and may raise. Raises Diagnostic E305 (the model cannot be
    traced) and E306 (unsupported rope type).
    """
    attention_interface.register()
    with quiet(), legacy_attention.llmc_attention(config.model_type):
        model = _build(config, dtype, pooled)
        _untie(model, untied)
        check(model)
        legacy_experts.patch(model)
        legacy_methods.patch(model)
        attention_interface.read_gates(model)
        computed = {**rope_interface.patch(model, max_positions), **alibi.patch(model)}
        _return_hidden_states(model, aux_layers)
        with recurrent_interface.llmc_recurrence(model):
            program = export(model, max_tokens, max_rows)
        return exported(model, program, computed, max_tokens, max_rows, len(aux_layers))


def exported(
    model: Any, program: torch.export.ExportedProgram, computed: Mapping[str, torch.Tensor], max_tokens: int,
    max_rows: int, num_hidden: int = 0,
) -> Exported:  # fmt: skip
    """Return a trace with its computed buffers: those in `computed`, its constants, and what the model initializes."""
    names = _computed_names(model, program)
    computed_constants = {**{n: t for n, t in program.constants.items() if t.device.type != "meta"}, **computed}
    buffers = {n: computed_constants[n] if n in computed_constants else recompute(model, n) for n in names}
    arrays = {n: t.detach().float().numpy() for n, t in buffers.items()}
    return Exported(model, program, types.MappingProxyType(arrays), max_tokens, max_rows, num_hidden)


def export_head(
    model: Any, dtype: torch.dtype, computed: Mapping[str, torch.Tensor], max_tokens: int, max_rows: int
) -> Exported:
    """Trace a head, whose forward also takes and returns hidden states [1, T, H] of `dtype`; see `exported`."""
    hidden = torch.empty((1, TOKENS, model.config.hidden_size), dtype=dtype, device="meta")
    program = export(model, max_tokens, max_rows, {"hidden_states": hidden})
    return exported(model, program, computed, max_tokens, max_rows, num_hidden=1)


def _return_hidden_states(model: Any, numbers: Sequence[int]) -> None:
    """Make the model return its logits and the inputs of the layers of these numbers; raises Diagnostic E305.

    The number of layers stands for the last hidden state, of which the logits are computed.
    """
    if not numbers:
        return
    count = int(model.config.get_text_config().num_hidden_layers)
    layers = next((m for _, m in layer_lists(model, count)), None)
    if layers is None:
        cause = f"{type(model).__name__} has no list of its {count} decoder layers, as a head that drafts needs"
        raise Diagnostic("E305", cause, "compile without the head")
    states: dict[int, torch.Tensor] = {}

    def keep(number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        states[number] = args[0] if args else kwargs["hidden_states"]

    def keep_last(out: Any) -> None:
        states[count] = out[0]

    for n in numbers:
        if n == count:
            model.get_decoder().register_forward_hook(lambda _, args, out: keep_last(out))
        else:
            layers[n].register_forward_pre_hook(lambda _, args, kwargs, n=n: keep(n, args, kwargs), with_kwargs=True)
    model.register_forward_hook(lambda _, args, out: (out.logits, *(states[n] for n in numbers)))


def _build(config: Any, dtype: str, pooled: PooledModel | None) -> Any:
    """Build the model on the meta device with our attention and experts; raises Diagnostic E305."""
    name = attention_interface.NAME
    options = {"attn_implementation": _attention(config), "experts_implementation": name, "dtype": TORCH_DTYPE[dtype]}
    try:
        with torch.device("meta"), model_class.towers_optional():
            if pooled is None:
                model = model_class.auto_class(config.model_type).from_config(config, **options)
            else:
                model = pooled_model.build(config, pooled.pooling, **options)
    except Diagnostic:
        raise
    except Exception as e:
        error = _failed(config.model_type, "cannot be built from its config", e)
        raise Diagnostic(error.code, error.cause, f"correct config.json; {KNOWN_TO_WORK}") from e
    legacy_experts.trim(model)
    keep_wide(model, TORCH_DTYPE[dtype])
    model.eval()
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
    if pooled is None:
        _check_positions(model)
    forward_inputs.keep_rows(model)
    attends = any(hasattr(m, "is_causal") for m in model.modules())
    omitted = {"position_ids"} if alibi.applies(config) or not attends else set()  # only our ops read them
    if not omitted:
        forward_inputs.take_positions(model)
    missing = {"position_ids", "logits_to_keep"} - omitted - set(inspect.signature(model.forward).parameters)
    if missing:
        raise Diagnostic(
            "E305",
            f"{type(model).__name__}.forward has no {' and no '.join(sorted(missing))} parameter",
            KNOWN_TO_WORK,
        )
    return model


def _attention(config: Any) -> Any:
    """Name the attention of each part of a model: ours in the text decoder, transformers' eager one in its towers."""
    text, name = config.get_text_config(), attention_interface.NAME
    towers = {k: "eager" for k in config.sub_configs if getattr(config, k, None) is not text}
    if text is config or len(towers) == len(config.sub_configs):
        return name
    return dict.fromkeys(config.sub_configs, name) | {"": name} | towers


def _untie(model: Any, names: Iterable[str]) -> None:
    """Make tied parameters, given by their names, parameters of their own."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        shared = model.get_parameter(name)
        setattr(model.get_submodule(path), leaf, torch.nn.Parameter(torch.empty_like(shared)))


def keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Apply dtypes that transformers fixes regardless of the model's dtype, such as float32 router corrections."""
    plan = {re.compile(pattern.replace("*", ".*")): wide for pattern, wide in model._get_dtype_plan(dtype).items()}
    for name, x in itertools.chain(model.named_parameters(), model.named_buffers()):
        wide = next((wide for pattern, wide in plan.items() if pattern.search(name)), None)
        if wide is not None and x.is_floating_point():
            x.data = x.data.to(wide)


def _check_positions(model: Any) -> None:
    """Reject models like RoBERTa, which number tokens from padding_idx + 1 and skip padding; ours count from 0."""
    for path, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise Diagnostic(
                "E305",
                f"{type(module).__name__} derives positions from its padding token, which is not supported",
                KNOWN_TO_WORK,
                loc=path,
            )


def export(
    model: Any, max_tokens: int, max_rows: int, more: Mapping[str, torch.Tensor] = types.MappingProxyType({})
) -> torch.export.ExportedProgram:
    """Run torch.export with dynamic T and R. `more` are further arguments, [1, T, ...]. Raises Diagnostic E305."""
    # torch requires bounds beyond the example's sizes, and beyond one; the IR's symbols keep the true bounds.
    tokens = torch.export.Dim("T", min=1, max=max(max_tokens, 2 * TOKENS))
    rows = torch.export.Dim("R", min=1, max=max(max_rows, 2 * ROWS))

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device="meta")

    inputs: dict[str, Any] = {"input_ids": ids(1, TOKENS), "position_ids": ids(1, TOKENS), "logits_to_keep": ids(ROWS)}
    dynamic: dict[str, Any] = {"input_ids": {1: tokens}, "position_ids": {1: tokens}, "logits_to_keep": {0: rows}}
    inputs |= more
    dynamic |= {name: {1: tokens} for name in more}
    accepted = inspect.signature(model.forward).parameters
    if "position_ids" not in accepted:  # only attention depends on positions, and it reads the graph's
        del inputs["position_ids"], dynamic["position_ids"]
    if "use_cache" in accepted:
        inputs["use_cache"], dynamic["use_cache"] = False, None
    try:
        with torch.no_grad():
            return torch.export.export(model, (), strict=False, kwargs=inputs, dynamic_shapes=dynamic)
    except Exception as e:
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, Diagnostic):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise _failed(type(model).__name__, "cannot be traced by torch.export", e, _where(model, e)) from e


def _failed(name: str, failure: str, e: Exception, at: tuple[str, str] = ("", "")) -> Diagnostic:
    """Return Diagnostic E305 for an exception of transformers or torch, with a specific reason if it is known."""
    loc, cls = at
    text = str(e)
    reason = f"{type(e).__name__}: {' '.join(text.split())[:200]}"
    if attention_interface.MaskTag.__name__ in text or (isinstance(e, KeyError) and attention_interface.NAME in text):
        reason = "it bypasses transformers' AttentionInterface"
    elif "Constraints violated (T)" in text:
        reason = "its forward is not one computation for every number of tokens (layers that divide a prompt are not)"
    elif "data-dependent" in text:
        reason = "a size in it depends on what it computes (experts that gather their own tokens, for example)"
    return Diagnostic("E305", f"{name} {failure}: {cls and cls + ': '}{reason}", KNOWN_TO_WORK, loc=loc)


def _where(model: torch.nn.Module, e: BaseException) -> tuple[str, str]:
    """Return the path and class of the innermost module that was running when `e` was raised; empty if none was."""
    paths = {id(m): path for path, m in model.named_modules()}
    innermost = ("", "")
    for frame, _ in traceback.walk_tb(e.__traceback__):
        running = frame.f_locals.get("self")
        if paths.get(id(running)):
            innermost = (paths[id(running)], type(running).__name__)
    return innermost


def _computed_names(model: Any, program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of buffers and constants that the program reads and that a checkpoint does not contain."""
    saved = set(model.state_dict())
    read = {n.name for n in program.graph.nodes if n.op == "placeholder" and n.users}
    out = []
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) not in read or spec.target is None:
            continue
        constant = spec.kind == InputKind.CONSTANT_TENSOR
        if constant and program.constants[spec.target].device.type == "meta":
            raise Diagnostic(
                "E305",
                f"{type(model).__name__} makes a constant tensor ({spec.target}) while it runs",
                "the model's forward must build its constants in __init__, as buffers",
            )
        if constant or (spec.kind == InputKind.BUFFER and spec.target not in saved):
            out.append(spec.target)
    return out


def _owner(model: Any, path: str) -> Any:
    """Return transformers' innermost model that contains the module at `path`: each initializes its own modules."""
    owner = module = model
    for part in filter(None, path.split(".")):
        module = getattr(module, part)
        owner = module if isinstance(module, transformers.PreTrainedModel) else owner
    return owner


def recompute(model: Any, name: str) -> torch.Tensor:
    """Compute a non-persistent buffer with the model's own initialization, on the CPU; parameters stay on meta."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    twin = copy.copy(module)
    twin._buffers = {
        k: torch.full(b.shape, float("nan"), dtype=b.dtype if b.is_floating_point() else torch.float32)
        for k, b in module._buffers.items()
        if b is not None
    }
    with torch.no_grad():
        owner = _owner(model, path)
        owner._init_weights(twin)
        value = twin._buffers[leaf]
        if value.isnan().any():  # a model may initialize the buffers of its layers together
            before, module._buffers[leaf] = module._buffers[leaf], value
            owner._init_weights(owner)
            module._buffers[leaf] = before
    if value.isnan().any():
        raise Diagnostic(
            "E305",
            f"buffer {name} of {type(module).__name__} is in no checkpoint and _init_weights does not compute it",
            "report the model: its buffer needs a row in llmc/frontend/export.py",
        )
    return value
