"""Tables of kernels by name, from which an extension imports a kernel when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def kernel_table(package: str, prefix: str, modules: Mapping[str, str]) -> Mapping[str, str]:
    """Return the kernels of a back end as "module:object" texts, by name.

    `modules` maps each module of `package` to its kernels in one text; the object of the kernel "PREFIX/row_mask" is
    ROW_MASK.
    """
    names = [(module, name) for module, kernels in modules.items() for name in kernels.split()]
    return MappingProxyType({f"{prefix}/{name}": f"{package}.{module}:{name.upper()}" for module, name in names})
