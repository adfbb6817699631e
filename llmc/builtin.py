"""The built-in extension: llmc's own passes, kernels, targets and pipelines, registered as a package's would be."""

from __future__ import annotations

from types import MappingProxyType

from llmc.codegen.cpu.table import KERNELS as CPU
from llmc.codegen.cuda.table import KERNELS as CUDA
from llmc.codegen.triton.table import KERNELS as TRITON
from llmc.extension import Extension
from llmc.targets.cpu import PIPELINE

PASSES = MappingProxyType(
    {
        "canonicalize": "llmc.passes.canonicalize:Canonicalize",
        "fuse-norm": "llmc.passes.fuse_norm:FuseNorm",
        "fuse-rope": "llmc.passes.fuse_rope:FuseRope",
        "page-attention": "llmc.passes.page_attention:PageAttention",
        "fuse-linear": "llmc.passes.fuse_linear:FuseLinear",
        "fold": "llmc.passes.fold:Fold",
        "fuse-pointwise": "llmc.passes.fuse_pointwise:FusePointwise",
        "fuse-qkv": "llmc.passes.fuse_qkv:FuseQkv",
        "split-k": "llmc.passes.split_k:SplitK",
        "split-single": "llmc.passes.split_single:SplitSingle",
        "split-kv": "llmc.passes.split_kv:SplitKv",
        "fuse-rows": "llmc.passes.fuse_rows:FuseRows",
        "split-sample": "llmc.passes.split_sample:SplitSample",
        "split-moe": "llmc.passes.split_moe:SplitMoe",
        "fuse-norm-linear": "llmc.passes.fuse_norm_linear:FuseNormLinear",
        "specialize": "llmc.passes.specialize:Specialize",
        "select": "llmc.codegen.select:Select",
        "pack": "llmc.codegen.select:Pack",
        "lift-weights": "llmc.passes.lift_weights:LiftWeights",
        "cse": "llmc.passes.cse:Cse",
        "dce": "llmc.passes.dce:Dce",
        "memory": "llmc.codegen.memory:Memory",
    }
)

EXTENSION = Extension(
    name="llmc",
    passes=PASSES,
    kernels=MappingProxyType({**CPU, **TRITON, **CUDA}),
    toolchains=MappingProxyType(
        {
            "cpp": "llmc.codegen.cpu.toolchain:CppToolchain.find",
            "triton": "llmc.codegen.triton.toolchain:TritonToolchain.find",
            "cuda": "llmc.codegen.cuda.toolchain:NvrtcToolchain.find",
        }
    ),
    targets=MappingProxyType(
        {
            "cpu:native": "llmc.targets.cpu:native",
            "cpu:x86-64-v3": "llmc.targets.cpu:x86_64_v3",
            "cpu:x86-64-v4": "llmc.targets.cpu:x86_64_v4",
            "cpu:portable": "llmc.targets.cpu:portable",
            "cuda:sm_80": "llmc.targets.gpu:sm_80",
            "cuda:sm_90": "llmc.targets.gpu:sm_90",
            "cuda:sm_100": "llmc.targets.gpu:sm_100",
            "hip:gfx942": "llmc.targets.gpu:gfx942",
        }
    ),
    pipelines=MappingProxyType({"serve": PIPELINE}),
)
