"""Shared by the scripts that write the quantised fixtures: base models, the oracle, the clean-up of JSON files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TOKENS = [3, 17, 42, 5, 61, 8, 29, 71, 12, 50, 33, 66]  # the prompt of the oracle's logits
SMALL = {
    "vocab_size": 80,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# 160 is no multiple of 64 or 128, 32 rows of k_proj and 64 columns of o_proj are less than a group or tile of 128.
TIED = SMALL | {"hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True}
BASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    # For producers that refuse ragged groups of 128.
    "llama256": ("llama", SMALL | {"intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}),
    "llama_tiles": (  # whole tiles of 128 alone
        "llama",
        SMALL | {"intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "num_key_value_heads": 2},
    ),
    "llama_short": ("llama", SMALL | {"num_hidden_layers": 1}),
    "qwen2_even": ("qwen2", TIED | {"intermediate_size": 128}),
    "gpt_oss": (
        "gpt_oss",
        SMALL
        | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen2": ("qwen2", TIED),  # biases of q, k, v; a tied head
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "intermediate_size": 32, "num_hidden_layers": 1}),
    "gpt2": (  # its products are of the class Conv1D, which holds transposes
        "gpt2",
        {"vocab_size": 80, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 128},
    ),
    "phi3": ("phi3", SMALL | {"head_dim": 64}),  # stores q, k, v as one weight
    "gpt_neox": ("gpt_neox", TIED | {"tie_word_embeddings": False, "num_key_value_heads": 2}),
    "qwen3_moe": (
        "qwen3_moe",  # layer 0: four experts; layer 1: a plain MLP
        SMALL
        | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
        | {"norm_topk_prob": True, "intermediate_size": 96},
    ),
}


def base(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A base model with random weights: norms vary by channel, and k_proj of layer 0 has groups of one sign or zero."""
    model_type, sizes = BASES[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(13)
    for key, p in sorted(model.named_parameters()):
        p.data.normal_(0, 0.12, generator=draw)
        if "norm" in key:
            p.data.mul_(4).exp_()
        if key.endswith("layers.0.self_attn.k_proj.weight"):
            p.data[3, :32].abs_().add_(0.05)
            p.data[5, :32].abs_().add_(0.05).neg_()
            p.data[7, :32] = 0
    return model.to(dtype).eval()


def save_base(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A new temporary folder with the base model and its tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    base(name, dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """Whole words w0 ... w79, for producers that want text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(80)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def samples(count: int = 32, length: int = 64) -> torch.Tensor:
    """Token ids for calibration, [count, length] int64."""
    return torch.randint(3, 80, (count, length), generator=torch.Generator().manual_seed(7))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "oracle.safetensors":
            with safe_open(path, "pt") as f:
                found |= {k: f.get_tensor(k) for k in f.keys()}
    return found


def clean(value: Any) -> Any:
    """Without what names the machine: gptqmodel's meta, absolute paths."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if k not in ("meta", "_name_or_path")}
    if isinstance(value, list):
        return [clean(v) for v in value]
    return "" if isinstance(value, str) and re.match(r"/\w+/", value) else value


KEPT = (
    "config.json", "quantize_config.json", "quantization_config.json", "quant_config.json", "hf_quant_config.json",
    "quanto_qmap.json",
)  # fmt: skip


def keep(written: Path, name: str) -> Path:
    """Copy what belongs to the fixture from the folder that the producer wrote, with cleaned JSON files."""
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(written.iterdir()):
        if path.suffix == ".safetensors":
            shutil.copyfile(path, folder / path.name)
        elif path.name in KEPT or path.name.endswith(".safetensors.index.json"):
            text = json.dumps(clean(json.loads(path.read_text())), indent=1, sort_keys=True)
            (folder / path.name).write_text(text + "\n")
    return folder


def plain(folder: Path, weights: Mapping[str, torch.Tensor], at: Path) -> None:
    """Write the float32 checkpoint of a fixture: `weights` (module -> [N, K]) and the unquantised tensors."""
    rest = {
        k: v.float()
        for k, v in tensors(folder).items()
        if not {k.partition(".weight.")[0], k.rpartition(".")[0]} & weights.keys() or k.endswith(".bias")
        if not re.search(r"\.(k_scale|v_scale|q_scale)$", k)
    }
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    values = rest | {f"{k}.weight": v.clone() for k, v in weights.items()}
    save_file({k: v.contiguous() for k, v in values.items()}, at / "model.safetensors", {"format": "pt"})
    (at / "config.json").write_text(json.dumps(config))


def plain_logits(at: Path) -> torch.Tensor:
    """Logits of a float32 checkpoint of which every tensor must be used."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(at, dtype=torch.float32, output_loading_info=True)
    unused = (
        set(info["missing_keys"]) - {"lm_head.weight"} | set(info["unexpected_keys"]) | set(info["mismatched_keys"])
    )
    if unused:
        raise ValueError(f"missing or unexpected: {sorted(unused)}")
    return logits(model.eval())


def expected(folder: Path, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the plain model, by a fresh interpreter: producers patch transformers' models and loaders."""
    with tempfile.TemporaryDirectory() as at:
        plain(folder, weights, Path(at))
        subprocess.run([sys.executable, __file__, at], check=True)
        return load_file(Path(at) / "logits.safetensors")["logits"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """[T, vocab] float32 logits of TOKENS."""
    return model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float().contiguous()


def digest(w: torch.Tensor) -> str:
    """sha256 of the float32 values in C order, little endian; -0 counts as 0."""
    return hashlib.sha256((w.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def packages(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {n: version(n) for n in (*names, "torch", "transformers")}


def oracle(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    how: str,
    made_with: Mapping[str, str],
    note: str = "",
    model: Any = None,
    producer_logits: torch.Tensor | None = None,
) -> None:
    """Write oracle.json (a digest of every dequantised weight) and oracle.safetensors (rows of some, logits).

    weights: module -> the producer's dequantised weight in float32, [N, K]. how: what dequantised them.
    model: the float32 model with these weights, where `plain` cannot build it.
    producer_logits: of the producer's own loader, with quantised activations if the format has them.
    """
    for k, w in weights.items():
        if w.dtype != torch.float32 or not w.isfinite().all():
            raise ValueError(f"{folder.name}: {k} is {w.dtype} or not finite")
    record = {
        "dequantised_by": how,
        "made_with": dict(made_with),
        "note": note,
        "tokens": TOKENS,
        "weights": {k: {"shape": list(w.shape), "sha256": digest(w)} for k, w in sorted(weights.items())},
    }
    (folder / "oracle.json").write_text(json.dumps(record, indent=1) + "\n")
    out = {f"rows.{k}": rows(w) for k, w in chosen(weights)}
    out["logits"] = expected(folder, weights) if model is None else logits(model)
    if producer_logits is not None:
        out["producer_logits"] = producer_logits
    save_file(out, folder / "oracle.safetensors")
    size = sum(p.stat().st_size for p in folder.iterdir())
    error = torch.nan if producer_logits is None else (producer_logits - out["logits"]).norm() / out["logits"].norm()
    print(f"{folder.name}: {len(weights)} weights, {size // 1024} KiB, producer logits differ by {float(error):.4f}")


def rows(w: torch.Tensor) -> torch.Tensor:
    """The first, a middle and the last row, float32 [3, K] (of the first and the last expert: [6, K])."""
    if w.ndim == 3:
        return torch.cat([rows(w[0]), rows(w[-1])])
    return w[[0, w.shape[0] // 2, w.shape[0] - 1]].clone()


def chosen(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """k_proj of layer 0, the smallest with groups of one sign; down_proj, whose K is ragged; the head; the last."""
    last = max(weights, default="")
    for k, w in weights.items():
        if k.endswith(("layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "lm_head")) or k == last:
            yield k, w


def run(make: Callable[[str], None], names: Iterable[str]) -> None:
    """Make the fixtures named on the command line, or all; a failure is shown and the rest still made."""
    failed = []
    for name in sys.argv[1:] or names:
        try:
            make(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":  # of `expected`: the folder of a plain checkpoint
    at = Path(sys.argv[1])
    save_file({"logits": plain_logits(at)}, at / "logits.safetensors")
