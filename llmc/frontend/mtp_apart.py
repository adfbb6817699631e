"""The multi-token-prediction layer of Qwen3-Next and Qwen3.5, which transformers leaves out of the model.

Checkpoints store it under `mtp.`: norms of the embedding and of the hidden state, a product of both, a decoder layer
with full attention, and a norm (as vLLM's qwen3_next_mtp computes it).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping

from llmc.frontend.mtp_names import FIRST_MTP_NAMES


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
    """The first MTP layer of a model, which is on the meta device, with the interface of mtp_head.MtpHead."""

    _supports_sdpa = _supports_flex_attn = _supports_flash_attn = True

    def __init__(self, main: Any) -> None:
        config = copy.deepcopy(main.config.get_text_config(decoder=True))
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        super().__init__(config)
        self.mtp = _Layer(main, config)
        self.embed_tokens, self.shared_head = main.get_input_embeddings(), main.get_output_embeddings()
        self.rotary_emb = type(main.get_decoder().rotary_emb)(config=config)
        self._keep_in_fp32_modules_strict = main._keep_in_fp32_modules_strict
        self.main = (main,)  # in a tuple, as it is no part of this module

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
