"""The public interface for packages that extend the compiler; docs/extending.md describes it and its stability.

This module has what ops, passes and targets need. Kernels have a module for each language (`cpp`, `triton`, `cuda`),
Triton templates one with device functions (`device_functions`), quantisation schemes one (`quant`). `llmc.testing` runs
kernels in tests. Each name is imported on first access.
"""

from __future__ import annotations

from types import MappingProxyType

from llmc.extend.exports import importer

_EXPORTS = MappingProxyType(
    {
        "Compiled": "llmc.codegen.toolchain:Compiled",
        "Ctx": "llmc.passes.base:Ctx",
        "Diagnostic": "llmc.diagnostics:Diagnostic",
        "Dim": "llmc.ir.dim:Dim",
        "Extension": "llmc.extension:Extension",
        "Graph": "llmc.ir.graph:Graph",
        "Kernel": "llmc.codegen.kernel:Kernel",
        "Limits": "llmc.targets.target:Limits",
        "Match": "llmc.passes.pattern:Match",
        "Module": "llmc.ir.graph:Module",
        "Node": "llmc.ir.graph:Node",
        "OPS": "llmc.ir.ops:OPS",
        "OpDef": "llmc.ir.opdef:OpDef",
        "Output": "llmc.codegen.toolchain:Output",
        "Pass": "llmc.passes.base:Pass",
        "Pat": "llmc.passes.pattern:Pat",
        "Rewrite": "llmc.passes.rewrite:Rewrite",
        "Schedule": "llmc.codegen.kernel:Schedule",
        "Simplify": "llmc.passes.rewrite:Simplify",
        "Source": "llmc.codegen.kernel:Source",
        "Target": "llmc.targets.target:Target",
        "Toolchain": "llmc.codegen.toolchain:Toolchain",
        "Type": "llmc.ir.types:Type",
        "Value": "llmc.ir.graph:Value",
        "apply": "llmc.passes.rewrite:apply",
        "arg": "llmc.ir.scalar:arg",
        "call": "llmc.ir.scalar:call",
        "const": "llmc.passes.pattern:const",
        "contents": "llmc.ir.contents",
        "cpu_targets": "llmc.targets.cpu_targets",
        "either": "llmc.passes.pattern:either",
        "gpu_targets": "llmc.targets.gpu_targets",
        "named": "llmc.passes.pattern:named",
        "op": "llmc.ir.opdef:op",
        "pointwise": "llmc.ir.ops.pointwise:pointwise",
        "product": "llmc.ir.dim:product",
        "shared": "llmc.passes.pattern:shared",
        "through": "llmc.passes.pattern:through",
    }
)
__all__ = [*_EXPORTS]
__getattr__, __dir__ = importer(__name__, _EXPORTS)
