"""Write a bf16 Qwen2 checkpoint as a GGUF file for llama.cpp; needs the package gguf.

    python -m bench.gguf_file CHECKPOINT OUT.gguf [f16 | q8_0 | q4_0]      format of matrices (default: f16)

All matrices, including the embedding and the head, have one format; gguf's own quantiser rounds them. It does not
convert real models: it writes no tokenizer, because llama.cpp receives token ids.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np

LAYER = (
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
)  # fmt: skip


def name_of(name: str) -> str:
    """Return the GGUF name of a checkpoint tensor."""
    if not name.startswith("model.layers."):
        plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem, leaf = name.rsplit(".", 1)
        return f"{plain[stem]}.{leaf}"
    _, _, layer, rest = name.split(".", 3)
    stem, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{dict(LAYER)[stem]}.{leaf}"


FILE_TYPES = MappingProxyType({"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"})


def write(checkpoint: Path, out: Path, form: str = "f16") -> None:
    """Write the file OUT: matrices in the format `form`, vectors in float32."""
    c = json.loads((checkpoint / "config.json").read_text())
    if c["model_type"] != "qwen2":
        raise SystemExit(f"{checkpoint}: a {c['model_type']}; this writes qwen2 alone")
    w = gguf.GGUFWriter(str(out), "qwen2")
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_file_type(gguf.LlamaFileType[FILE_TYPES[form]])
    w.add_tokenizer_model("no_vocab")
    w.add_vocab_size(c["vocab_size"])
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        (n,) = struct.unpack("<Q", data[:8].tobytes())
        for name, t in json.loads(data[8 : 8 + n].tobytes()).items():
            begin, end = t["data_offsets"]
            bits = data[8 + n + begin : 8 + n + end].view(np.uint16)
            x = (bits.astype(np.uint32) << 16).view(np.float32).reshape(t["shape"])
            kind = gguf.GGMLQuantizationType[form.upper()]
            if x.ndim > 1:
                w.add_tensor(name_of(name), gguf.quantize(x, kind), raw_dtype=kind)
            else:
                w.add_tensor(name_of(name), x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
