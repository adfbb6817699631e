"""Traces a multi-token-prediction layer of a checkpoint (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a head.

The layer is transformers' MtpLayer, or that of Qwen3-Next and Qwen3.5, which transformers leaves out (ApartHead): a
decoder layer of the model over its last hidden state and the embedding of the next token, with the model's embedding
and output projection. Of several layers, the first one drafts all tokens. The graph has the interface of an EAGLE-3
head's (see eagle_head), with the model's own vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from llmc.diagnostics import Diagnostic
from llmc.frontend import attention_interface, legacy_attention, rope_interface
from llmc.frontend.convert import convert
from llmc.frontend.export import export_head, keep_wide, quiet
from llmc.frontend.lowering import TORCH_DTYPE
from llmc.frontend.mtp_names import FIRST_MTP_NAMES, OTHER_DRAFTS, are_apart, tensors_of
from llmc.frontend.trace_model import Traced, WeightInfo

EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.weight"  # names of the model's own tensors


class _Layer(nn.Module):
    """The modules by their names in checkpoints."""

    def __init__(self, main: Any, config: Any) -> None:
        super().__init__()
        model, width = main.get_decoder(), config.hidden_size
        layer, norm = type(model.layers[0]), type(model.layers[0].input_layernorm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])


class ApartHead(PreTrainedModel):
    """The first MTP layer of a model, which is on the meta device, with the interface of MtpHead.

    Checkpoints store it under `mtp.`: norms of the embedding and of the hidden state, a product of both, a decoder
    layer with full attention, and a norm (as vLLM's qwen3_next_mtp computes it).
    """

    _supports_sdpa = _supports_flex_attn = _supports_flash_attn = True

    def __init__(self, main: Any) -> None:
        config = copy.deepcopy(main.config.get_text_config(decoder=True))
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        super().__init__(config)
        self.mtp = _Layer(main, config)
        self.embed_tokens, self.shared_head = main.get_input_embeddings(), main.get_output_embeddings()
        self.rotary_emb = type(main.get_decoder().rotary_emb)(config=config)
        self._keep_in_fp32_modules_strict = main._keep_in_fp32_modules_strict
        self.main = (main,)  # in a tuple, so that torch does not register it as a submodule

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [1, T], rows [R], hidden states [1, T, H] -> logits [1, R, ids], states [1, T, H]."""
        embedding, mtp = self.embed_tokens(input_ids), self.mtp
        tables = self.rotary_emb(embedding, position_ids)
        x = mtp.fc(torch.cat((mtp.pre_fc_norm_embedding(embedding), mtp.pre_fc_norm_hidden(hidden_states)), -1))
        x = mtp.norm(mtp.layers[0](x, position_embeddings=tables, attention_mask=None, position_ids=position_ids))
        return self.shared_head(x[:, logits_to_keep]), x

    def owns(self, name: str) -> bool:
        """Whether the checkpoint's tensor of this name belongs to the layer."""
        return FIRST_MTP_NAMES.match(name) is not None

    def checkpoint_transforms(self) -> list[Any]:
        """Return the converters of the layer's tensors, which are those of the model."""
        return list(conversion_mapping.get_model_conversion_mapping(self.main[0]))


class MtpHead(MtpModel):
    """The first MTP layer of a model, which is on the meta device."""

    def __init__(self, main: Any) -> None:
        super().__init__(main, 1)
        self.rotary_emb = type(main.get_decoder().rotary_emb)(config=self.config)
        self._keep_in_fp32_modules_strict = main._keep_in_fp32_modules_strict
        self.main = (main,)  # in a tuple, so that torch does not register it as a submodule

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [1, T], rows [R], hidden states [1, T, H] -> logits [1, R, ids], states [1, T, H]."""
        embedding = self.embed_tokens(input_ids)
        tables = self.rotary_emb(embedding, position_ids)
        x = self.layers[0](embedding, hidden_states, tables, None, position_ids, None)
        if self.use_shared_post_norm:
            x = self.shared_post_norm(x)
        return self._project_to_logits(x[:, logits_to_keep]), x

    def owns(self, name: str) -> bool:
        """Whether the checkpoint's tensor of this name belongs to the layer."""
        pattern = tensors_of(self.main[0].config, 1)
        return pattern is not None and pattern.search(name) is not None

    def checkpoint_transforms(self) -> list[Any]:
        """Return the renamings and converters of the layer's tensors, as MtpModel.from_pretrained does."""
        (main,) = self.main
        number = int(main.config.get_text_config().num_hidden_layers)
        renaming = WeightRenaming(source_patterns=f"layers.{number}.", target_patterns="layers.0.mtp_block.")
        layers = conversion_mapping.get_checkpoint_conversion_mapping(MtpModel.__name__) or ()
        return [renaming, *layers, *conversion_mapping.get_model_conversion_mapping(main)]


@dataclass(frozen=True)
class TracedHead:
    """A traced MTP layer.

    traced: its graph @main, and its own weights. shared: pairs of an input and the model's module that has this weight.
    """

    traced: Traced
    shared: Sequence[tuple[str, Any]]


def trace_mtp(traced: Traced, tokens: int, rows: int) -> TracedHead:
    """Trace the first MTP layer of the checkpoint of `traced`; `tokens` and `rows` are upper bounds of T and R.

    Raises Diagnostic E360 if the model has no such layer that is supported.
    """
    main, dtype = traced.model, TORCH_DTYPE[traced.facts.dtype]
    attention_interface.register()
    with quiet(), legacy_attention.llmc_attention(main.config.model_type):
        try:
            with torch.device("meta"):
                head = ApartHead(main) if are_apart(main) else MtpHead(main)
        except Exception as e:  # transformers raises many types; each means that the model has no such layer
            reason = " ".join(str(e).split())[:200]
            cause = f"transformers has no multi-token-prediction layer for {traced.facts.architecture}: {reason}"
            raise Diagnostic("E360", cause, OTHER_DRAFTS) from e
        head.to(dtype).eval()
        keep_wide(head, dtype)
        attention_interface.read_gates(head)
        computed = rope_interface.patch(head, traced.facts.max_positions)
        exported = export_head(head, dtype, computed, tokens, rows)
    module = convert(exported).module
    names = [v for v in module.graphs["main"].inputs if v.weight and v.name not in (EMBEDDING, HEAD)]
    weights = {v.name: WeightInfo(v.name, v.type, v.name.rpartition(".")[0]) for v in names}
    of_head = replace(
        traced, module=module, weights=MappingProxyType(weights), buffers=exported.buffers, tied=MappingProxyType({}),
        model=head,
    )  # fmt: skip
    return TracedHead(of_head, ((EMBEDDING, main.get_input_embeddings()), (HEAD, main.get_output_embeddings())))
