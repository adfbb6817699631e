"""The order of the sums of tl.dot, which depends on the matrix instruction that Triton chooses for a tile.

All instructions of a kind add the same number of columns at a time, from the first to the last: tiles of other sizes
give an element the same bits. Warpgroups have their own instruction (wgmma), whose sums may be rounded otherwise.
"""

from __future__ import annotations

from llmc.targets.target import Target

GROUP_ROWS, GROUP_COLUMNS, GROUP_WARPS = 64, 16, 4  # a tile of whole multiples is multiplied by warpgroups


def dot_order(target: Target, dtype: str, rows: int, columns: int, warps: int) -> str:
    """Return the order of the sums of a product [rows, columns] of factors of `dtype`, in one chain over the depth."""
    if dtype in ("f32", "tl.float32"):
        return "fma"  # float32 is multiplied without matrix instructions, one column after another
    whole = rows % GROUP_ROWS == columns % GROUP_COLUMNS == warps % GROUP_WARPS == 0
    return f"{'wgmma' if target.arch == 'sm_90' and whole else 'mma'} {dtype}"
