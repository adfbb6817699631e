"""Random multi-token-prediction layers as checkpoints store them, and transformers' layer, run by itself."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from models.cases import FURTHER, UNLISTED, Case
from models.kit import save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from llmc.frontend.export import quiet


def case_of(name: str, layers: int = 1) -> Case:
    """The case of this name, with a config that declares MTP layers."""
    case = next(c for c in (*UNLISTED, *FURTHER) if c.name == name)
    return replace(case, config={**case.config, "num_nextn_predict_layers": layers})


def save_with_layer(case: Case, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Save a random model with a random MTP layer; return both as transformers' modules."""
    model = save(case, folder, seed, dtype)
    with quiet():
        layer = MtpModel(model, 1).to(dtype).eval()
    for name, p in layer.layers.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
    number = int(model.config.num_hidden_layers)
    found = _as_stored(layer.layers[0].state_dict())
    stored = {f"model.layers.{number}.{n}": x for n, x in found.items()}
    stored[f"model.layers.{number}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    path = folder / "model.safetensors"
    save_file({**load_file(path), **stored}, path, metadata={"format": "pt"})
    return model, layer


def _as_stored(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of published checkpoints, with experts one by one."""
    out: dict[str, Tensor] = {}
    for name, x in found.items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, both in enumerate(x):
                for part, y in zip(("gate", "up"), both.chunk(2), strict=True):
                    out[f"{base}.{i}.{part}_proj.weight"] = y.clone()
        elif last == "down_proj":
            out |= {f"{base}.{i}.down_proj.weight": y.clone() for i, y in enumerate(x)}
        else:
            out[name] = x.clone()
    return out


class ApartLayer(torch.nn.Module):
    """The layer that checkpoints of Qwen3-Next and Qwen3.5 store under `mtp.`, with the interface of MtpModel."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder, config = model.get_decoder(), deepcopy(model.config)
        config.layer_types, config._attn_implementation = ["full_attention"], "eager"
        norm, width = type(decoder.norm), config.hidden_size
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.mtp = torch.nn.ModuleDict({name: norm(width, eps=config.rms_norm_eps) for name in norms})
        self.mtp["fc"] = torch.nn.Linear(2 * width, width, bias=False)
        self.mtp["layers"] = torch.nn.ModuleList([type(decoder.layers[0])(config, 0)])
        self.embed_tokens, self.shared_head = model.get_input_embeddings(), model.lm_head
        self.rotary_emb, self.layers = decoder.rotary_emb, [self.layer]

    def layer(
        self, embedding: Tensor, hidden: Tensor, tables: Any, mask: Tensor, positions: Tensor, cache: None
    ) -> Tensor:
        joined = torch.cat((self.mtp["pre_fc_norm_embedding"](embedding), self.mtp["pre_fc_norm_hidden"](hidden)), -1)
        block = self.mtp["layers"][0]
        x = block(self.mtp["fc"](joined), position_embeddings=tables, attention_mask=mask, position_ids=positions)
        return cast(Tensor, self.mtp["norm"](x))


def save_with_layer_apart(case: Case, folder: Path, seed: int = 0) -> tuple[Any, Any]:
    """Save a random model with a random MTP layer under `mtp.`; return both as torch modules."""
    model = save(case, folder, seed)
    layer = ApartLayer(model).eval()
    for name, p in layer.mtp.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.15)
    path = folder / "model.safetensors"
    stored = {f"mtp.{name}": x for name, x in _as_stored(layer.mtp.state_dict()).items()}
    save_file({**load_file(path), **stored}, path, metadata={"format": "pt"})
    return model, layer


@torch.no_grad()
def drafted(model: Any, head: Any, tokens: list[int], count: int, bias: Mapping[int, float]) -> list[int]:
    """Return the greedy drafts after `tokens`, all but the last of which the model has computed."""
    hidden = model.get_decoder()(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    known, out = list(tokens), list[int]()
    for _ in range(count):
        embedding = head.embed_tokens(torch.tensor([known[1:]]))
        length = embedding.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        # Rotary tables of models that read images take a position for each of three axes.
        of_axes = positions.expand(3, 1, -1) if hasattr(head.rotary_emb, "mrope_section") else positions
        tables = head.rotary_emb(embedding, of_axes)
        x = head.layers[0](embedding, hidden, tables, mask, positions, None)
        logits = head.shared_head(x[0, -1]).float()
        for token, value in bias.items():
            logits[token] += value
        out.append(int(logits.argmax()))
        known.append(out[-1])
        hidden = torch.cat((hidden, x[:, -1:]), 1)
    return out
