"""FlashInfer's XQA as headers of `kernels/xqa.cu`: the files of the package, with llmc's changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType

DISTRIBUTION = "flashinfer-python"
FOLDER = "flashinfer/data/csrc/xqa"
FILES = (
    "mha.cu", "mhaUtils.cuh", "mha_components.cuh", "mha_stdheaders.cuh", "mha.h", "defines.h", "utils.h", "utils.cuh",
    "barriers.cuh", "cuda_hint.cuh", "ldgsts.cuh", "mma.cuh", "platform.h",
)  # fmt: skip
# mha.cu is cut where its functions for hosts and its own kernel function begin: after the function of all blocks.
END = "#if SPEC_DEC\n#if __CUDA_ARCH__ == 900 && M_TILESIZE == 16"


@dataclass(frozen=True)
class Change:
    """A text of one file that is replaced wherever it stands; `count` is how often that must be."""

    old: str
    new: str
    count: int = 1


_LSE = """\
if (PARTS > 0 && warpIdx.x == 0) {
      // The logarithm of the sum of exponentials of each query head, for the combination of the parts.
      for (uint32_t i = 0; i < ThrdRegRowMax::size; i++) {
        uint32_t const row = warp_size * i + laneId();
        float const sum = globalRowMax[i] + logf(globalRowSum[i]);
        float const none = __int_as_float(0xff800000);
        float* const sums = reinterpret_cast<float*>(scratch);
        if (row < headGrpSize)
          sums[(headGrpSize * idxHeadGrp + row) * HEAD_STRIDE] = seqIterInit < nbSeqIters ? sum : none;
      }
    }
    float voScale = valueScale;"""

CHANGES: Mapping[str, Sequence[Change]] = MappingProxyType(
    {
        "mha.cu": (
            Change("threadIdx.", "xqa_thread().", 8),
            # Every block is a request of its own: its pointers begin at its token and its pages.
            Change("uint32_t const idxReq = blockIdx.z;", "uint32_t const idxReq = 0;"),
            # Keys and values have separate scales.
            Change(
                "float const kvCacheScaleValue = kvScalePtr != nullptr ? kvScalePtr[0] : kvCacheScale;",
                "float const kvCacheScaleValue = kvScalePtr != nullptr ? kvScalePtr[0] : kvCacheScale;\n"
                "  float const valueScale = kvScalePtr != nullptr ? kvScalePtr[KV_HEADS] : 1.f;",
            ),
            Change("float voScale = (isKVCacheQuantized ? kvCacheScaleValue : 1.F);", _LSE),
            # The results of a part are floats, with the parts of a head side by side.
            Change("dst[nbQHeads * idxBeam + idxHead])[n] = outVec", "dst[HEAD_STRIDE * idxHead])[n] = outVec"),
        ),
        "mha.h": (
            Change(
                "using OutputHead = mha::conditional_t<lowPrecOutput, GMemCacheHead, InputHead>;",
                "using OutputHead = mha::conditional_t<(PARTS > 0), Vec<float, validElemsPerHead>, InputHead>;",
            ),
        ),
        "mhaUtils.cuh": (
            # The length of a block's span is in the field that its one request does not need.
            Change("return getSeqLen(cacheList.seqLenList, idxReq);", "return cacheList.maxNbPagesPerSeq;"),
        ),
        "utils.cuh": (Change("threadIdx.", "xqa_thread().", 3),),
    }
)


def headers() -> dict[str, str]:
    """Return name -> text of the headers, with the changes; raises ValueError if the package's text differs."""
    folder = Path(str(distribution(DISTRIBUTION).locate_file(FOLDER)))
    texts = {name: (folder / name).read_text() for name in FILES}
    kernel, launcher, _ = texts["mha.cu"].partition(END)
    texts["mha.cu"] = f"{kernel}#endif\n"
    if not launcher:
        raise ValueError("mha.cu does not end as expected")
    for name, changes in CHANGES.items():
        for change in changes:
            if texts[name].count(change.old) != change.count:
                raise ValueError(f"{name} does not contain {change.old!r} {change.count} times")
            texts[name] = texts[name].replace(change.old, change.new)
    return texts
