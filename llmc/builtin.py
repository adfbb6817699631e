"""The built-in extension: llmc's own passes, kernels, targets and pipelines, declared like those of a package."""

from __future__ import annotations

from types import MappingProxyType

from llmc.codegen.kernel_table import CPU, CUDA, CUTE, FLASHINFER, NCCL, TRITON
from llmc.extension import Extension
from llmc.targets.cpu_targets import PIPELINE

PASSES = MappingProxyType(
    {
        "canonicalize": "llmc.passes.canonicalize.canonicalize:Canonicalize",
        "fuse-norm": "llmc.passes.fuse.fuse_norm:FuseNorm",
        "fuse-rope": "llmc.passes.fuse.fuse_rope:FuseRope",
        "absorb-latent": "llmc.passes.fuse.absorb_latent:AbsorbLatent",
        "page-attention": "llmc.passes.lower.page_attention:PageAttention",
        "shard": "llmc.passes.lower.shard:Shard",
        "gather-first": "llmc.passes.lower.gather_first:GatherFirst",
        "fuse-reduce": "llmc.passes.fuse.fuse_reduce:FuseReduce",
        "fuse-reduce-norm": "llmc.passes.fuse.fuse_reduce_norm:FuseReduceNorm",
        "fuse-linear": "llmc.passes.fuse.fuse_linear:FuseLinear",
        "fold": "llmc.passes.weights.fold:Fold",
        "quantize": "llmc.passes.weights.quantize:Quantize",
        "fuse-pointwise": "llmc.passes.fuse.fuse_pointwise:FusePointwise",
        "fuse-qkv": "llmc.passes.fuse.fuse_qkv:FuseQkv",
        "split-k": "llmc.passes.split.split_k:SplitK",
        "split-single": "llmc.passes.split.split_single:SplitSingle",
        "split-recurrence": "llmc.passes.split.split_recurrence:SplitRecurrence",
        "split-kv": "llmc.passes.split.split_kv:SplitKv",
        "fuse-rows": "llmc.passes.fuse.fuse_rows:FuseRows",
        "split-sample": "llmc.passes.split.split_sample:SplitSample",
        "split-moe": "llmc.passes.split.split_moe:SplitMoe",
        "gather-experts": "llmc.passes.split.gather_experts:GatherExperts",
        "fuse-experts": "llmc.passes.fuse.fuse_experts:FuseExperts",
        "fuse-norm-linear": "llmc.passes.fuse.fuse_norm_linear:FuseNormLinear",
        "fuse-norm-quantized": "llmc.passes.fuse.fuse_norm_quantized:FuseNormQuantized",
        "lower-quantized": "llmc.passes.lower.lower_quantized:LowerQuantized",
        "to-fnuz": "llmc.passes.lower.to_fnuz:ToFnuz",
        "specialize": "llmc.passes.lower.specialize:Specialize",
        "narrow-tokens": "llmc.passes.lower.narrow_tokens:NarrowTokens",
        "select": "llmc.codegen.select:Select",
        "pack": "llmc.codegen.pack:Pack",
        "lift-weights": "llmc.passes.weights.lift_weights:LiftWeights",
        "cse": "llmc.passes.canonicalize.cse:Cse",
        "dce": "llmc.passes.canonicalize.dce:Dce",
        "memory": "llmc.codegen.memory:Memory",
    }
)

EXTENSION = Extension(
    name="llmc",
    passes=PASSES,
    kernels=MappingProxyType({**CPU, **TRITON, **CUDA, **CUTE, **FLASHINFER, **NCCL}),
    toolchains=MappingProxyType(
        {
            "cpp": "llmc.codegen.backends.cpp.cpp_toolchain:CppToolchain.find",
            "triton": "llmc.codegen.backends.triton.triton_toolchain:TritonToolchain.find",
            "cuda": "llmc.codegen.backends.cuda.nvrtc_toolchain:NvrtcToolchain.find",
            "cute": "llmc.codegen.backends.cute.cute_toolchain:CuteToolchain.find",
            "flashinfer": "llmc.codegen.backends.flashinfer.flashinfer_toolchain:FlashinferToolchain.find",
            "nccl": "llmc.codegen.backends.nccl.nccl_toolchain:NcclToolchain.find",
        }
    ),
    targets=MappingProxyType(
        {
            "cpu:native": "llmc.targets.cpu_targets:native",
            "cpu:x86-64-v3": "llmc.targets.cpu_targets:x86_64_v3",
            "cpu:x86-64-v4": "llmc.targets.cpu_targets:x86_64_v4",
            "cpu:portable": "llmc.targets.cpu_targets:portable",
            "cuda:sm_80": "llmc.targets.gpu_targets:sm_80",
            "cuda:sm_90": "llmc.targets.gpu_targets:sm_90",
            "cuda:sm_100": "llmc.targets.gpu_targets:sm_100",
            "hip:gfx90a": "llmc.targets.gpu_targets:gfx90a",
            "hip:gfx942": "llmc.targets.gpu_targets:gfx942",
            "hip:gfx950": "llmc.targets.gpu_targets:gfx950",
        }
    ),
    schemes=MappingProxyType(
        {
            "gptq": "llmc.quant.gptq:gptq",
            "awq": "llmc.quant.awq:awq",
            **dict.fromkeys(("auto-round", "intel/auto-round"), "llmc.quant.auto_round:auto_round"),
            "compressed-tensors": "llmc.quant.compressed_tensors:compressed_tensors",
            "fp8": "llmc.quant.fp8:fp8",
            "fbgemm_fp8": "llmc.quant.fp8:fbgemm_fp8",
            "mxfp8": "llmc.quant.fp8:mxfp8",
            "mxfp4": "llmc.quant.mxfp4:mxfp4",
            "bitsandbytes": "llmc.quant.bitsandbytes:bitsandbytes",
            "torchao": "llmc.quant.torchao:torchao",
            "hqq": "llmc.quant.hqq:hqq",
            "bitnet": "llmc.quant.bitnet:bitnet",
            "quark": "llmc.quant.quark:quark",
            "quanto": "llmc.quant.quanto:quanto",
            "eetq": "llmc.quant.eetq:eetq",
            "gemma": "llmc.quant.gemma:gemma",
            "mlx": "llmc.quant.mlx:mlx",
            "metal": "llmc.quant.mlx:metal",
            **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), "llmc.quant.modelopt:modelopt"),
        }
    ),
    pipelines=MappingProxyType({"serve": PIPELINE}),
)
