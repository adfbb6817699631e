"""Programmatic dependent launch: a kernel may begin while the kernel before it in the stream still runs."""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(DEPENDENT_LAUNCH: tl.constexpr):
    """Wait until the writes of the previous kernels are visible, and allow the next kernel to begin.

    Every program calls this exactly once, before it returns and before it touches memory that a previous kernel may
    read or write. It does nothing on targets without programmatic dependent launch.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_eagerly(DEPENDENT_LAUNCH: tl.constexpr, EAGER: tl.constexpr):
    """Like `wait_for_previous`, but with EAGER the next kernel may begin before the previous ones have completed.

    It may then only read weights before its own wait.
    """
    if DEPENDENT_LAUNCH:
        if EAGER:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EAGER:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_before_loads(DEPENDENT_LAUNCH: tl.constexpr, LATE_LAUNCH: tl.constexpr):
    """Like `wait_for_previous`, but with LATE_LAUNCH the next kernel may begin only at `launch_after_loads`."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        if not LATE_LAUNCH:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def launch_after_loads(DEPENDENT_LAUNCH: tl.constexpr, LATE_LAUNCH: tl.constexpr):
    """Allow the next kernel to begin, unless `wait_before_loads` did. Call this after the last load of a program."""
    if DEPENDENT_LAUNCH and LATE_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
