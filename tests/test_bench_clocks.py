"""bench.gpu.clocks without a GPU: samples of a stand-in of NVML, and what is printed of them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from bench.gpu import nvml
from bench.gpu.account import Kernel
from bench.gpu.clocks import Span, beside, busy, described, lasted, slowness
from bench.gpu.nvml import Nvml, Sample, Sampler, reasons_of

LIBRARY = """
typedef struct { unsigned field, scope; long long at, latency; int type, status; unsigned long long value; } Field;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) { *gpu = (void *)(long)(i + 1); return i > 1 ? 2 : 0; }
int nvmlDeviceGetClockInfo(void *gpu, unsigned kind, unsigned *mhz) {
  *mhz = gpu == (void *)1 ? 1980 : 345; return kind != 1;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
  *bits = gpu == (void *)1 ? 0 : 4; return 0;
}
int nvmlDeviceGetFieldValues(void *gpu, int count, Field *field) {
  field->value = 0xFFFFFFFF00000000ull + (gpu == (void *)1 ? 650000 : 120000);
  return field->field != 186 || count != 1;
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in of NVML with two GPUs, which processes that start now find."""
    (tmp_path / "nvml.c").write_text(LIBRARY)
    path = tmp_path / nvml.LIBRARY
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "nvml.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return path


def test_a_reading_has_the_clock_power_and_reasons_of_every_gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    first, second = Nvml().read()
    assert first[1:] == (0, 1980, 650000, 0) and second[1:] == (1, 345, 120000, 4)
    assert reasons_of([first]) == [] and reasons_of([first, second]) == ["software power cap 50 %"]


def test_another_process_samples_until_the_context_ends(library: Path) -> None:
    begin = time.perf_counter_ns()
    with Sampler() as sampler:
        time.sleep(0.1)
    assert {s.gpu for s in sampler.samples} == {0, 1}
    assert all(begin < s.ns < time.perf_counter_ns() for s in sampler.samples)


def test_a_sampler_without_nvml_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="NVML cannot be sampled"), Sampler():
        pass


def test_samples_are_those_between_begin_and_end() -> None:
    samples = [
        Sample(ns, gpu, 1980 - 100 * gpu, 700_000, 4 * gpu) for ns in range(0, 10_000_000, 100) for gpu in (1, 0)
    ]
    assert {gpu: len(found) for gpu, found in beside(samples, 0, 999).items()} == {0: 10, 1: 10}
    line = described(samples, [Span("prompt 1", 0, 5_000_000), Span("prompt 2", 6_000_000, 9_000_000)])
    assert "2 x    4.00 ms (at most 5.0, 0.01 s in all)" in line
    assert "GPU 0: 1980 to 1980 MHz (mean 1980), 700 W, no reason" in line
    assert "GPU 1: 1880 to 1880 MHz (mean 1880), 700 W, software power cap 100 %" in line
    assert described(samples, [Span("late", 1 << 40, 2 << 40)]).endswith("no sample")


def test_slowness_is_beside_the_median_of_each_kernel() -> None:
    def graph(call: int, slow: int) -> list[Kernel]:
        names = ["llmc_linear"] * 8 + ["llmc_all_reduce_norm"]
        took = [100 * slow if i >= 4 else 100 for i in range(len(names))]
        return [Kernel(name, call * 10**9 + 1000 * i, took[i], call) for i, name in enumerate(names)]

    first, *lines = slowness([k for call, slow in enumerate((1, 1, 5)) for k in graph(call, slow)], 3)
    assert first == "27 kernels, 0 more than 3 prompts of 9"
    assert lines[1].startswith(
        "   0.01 ms, of which idle   0.01; by quarter, kernels take 1.00 1.00 1.00 1.00 of their"
    )
    assert (
        "kernels take 1.00 1.00 5.00 5.00 of their medians; collectives 5.00 (median 5.00, longest 0.00 ms)" in lines[2]
    )


def test_overlapping_kernels_are_busy_once() -> None:
    kernels = [Kernel("a", 0, 3_000_000, 1), Kernel("b", 1_000_000, 1_000_000, 1), Kernel("c", 5_000_000, 2_000_000, 1)]
    assert (lasted(kernels), busy(kernels)) == (7.0, 5.0)
