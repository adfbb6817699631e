"""The order in which a Triton kernel waits for the launches before it and accesses the memory of its parameters."""

from __future__ import annotations

import re

from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.codegen.kernel import Source
from llmc.targets.target import Target

_DEFINES = re.compile(r"\s*(%\w+)(?::\d+)? = (\S+) (.*)")
_NAMES = re.compile(r"%\w+")


def memory_order(source: Source, target: Target) -> list[str]:
    """Return the program's memory operations in order: "load x0", "store y0", "wait", "launch_dependents".

    Compiles the text to Triton's own intermediate representation, in which device functions are inlined, and follows
    each pointer back to the parameter that it is computed from. A pointer that is selected from several parameters
    counts as the first of them.
    """
    roots: dict[str, str] = {}
    order = []
    for line in ttir(source, target).splitlines():
        if event := re.search(r'"griddepcontrol\.(\w+);', line):
            order.append(event[1])
        elif stored := re.search(r"tt\.store (%\w+)", line):
            order.append(f"store {_root(stored[1], roots)}")
        elif defined := _DEFINES.match(line):
            name, op, operands = defined.groups()
            used = _NAMES.findall(operands)
            pointers = [x for x in used if _root(x, roots)]
            if op in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "arith.select") and pointers:
                roots[name] = _root(pointers[0], roots)
            if op == "tt.load":
                order.append(f"load {_root(used[0], roots)}")
    return order


def _root(name: str, roots: dict[str, str]) -> str:
    """The parameter that a pointer is computed from; nothing for values that are no pointers."""
    return name[1:] if re.fullmatch(r"%[xy]\d+", name) else roots.get(name, "")


def ttir(source: Source, target: Target) -> str:
    """The kernel in Triton's intermediate representation, as its first stage leaves it."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    fn = load_entry(source.text, source.entry)
    ast = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, {})
    gpu = GPUTarget(target.family, int(target.arch.removeprefix("sm_")), target.limits.warp)
    backend = make_backend(gpu)
    options = backend.parse_options({**dict(source.options), **ast.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = ast.make_ir(gpu, options, codegen, modules, context)
    stages: dict = {}
    backend.add_stages(stages, options, ast.language)
    return str(stages["ttir"](module, {}))
