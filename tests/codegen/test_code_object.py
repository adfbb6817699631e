"""Metadata of AMD code objects: reading it, comparing it with launches, and rejecting invalid bytes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from codegen.test_triton_toolchain import GOOD
from draw import SEED

from llmc.codegen.backends.triton.triton_toolchain import Compiled, Job, compile_one
from llmc.codegen.code_object import check_launch, read_kernel
from llmc.diagnostics import Diagnostic
from llmc.targets.gpu_targets import gfx942


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    _, found = compile_one(Job.of("", GOOD, gfx942()))
    assert isinstance(found, Compiled)
    return found


def test_the_properties_of_a_kernel(compiled: Compiled) -> None:
    kernel = read_kernel(compiled.binary, "double")
    assert kernel.sizes == (8, 8, 4, 8, 8) and kernel.wavefront == 64 and kernel.max_threads == compiled.threads == 128
    assert 0 < kernel.vgprs <= 512 and kernel.sgprs > 0
    assert kernel.vgpr_spills == kernel.sgpr_spills == kernel.private == kernel.shared == 0
    with pytest.raises(ValueError, match="no kernel 'triple'"):
        read_kernel(compiled.binary, "triple")


def test_launches_that_differ_from_the_binary(compiled: Compiled) -> None:
    check_launch(GOOD, compiled.binary, 128, 64, scratch=2)
    with pytest.raises(Diagnostic, match=r"E505.*pass .* \[8, 8, 4, 4\] bytes, the binary .* \[8, 8, 4, 8, 8\]"):
        check_launch(replace(GOOD, params=(*GOOD.params, "i32")), compiled.binary, 128, 64, scratch=2)
    with pytest.raises(Diagnostic, match=r"E505.*blocks of 256 threads, the binary allows 128"):
        check_launch(GOOD, compiled.binary, 256, 64, scratch=2)
    with pytest.raises(Diagnostic, match=r"E505.*wavefronts of 32 threads, the binary of 64"):
        check_launch(GOOD, compiled.binary, 128, 32, scratch=2)
    with pytest.raises(Diagnostic, match=r"E505.*not a 64-bit ELF file"):
        check_launch(GOOD, b"none", 128, 64)


def test_damaged_code_objects_raise_only_value_errors(compiled: Compiled) -> None:
    rng = Random(SEED)
    note = compiled.binary.index(b"amdhsa.kernels")
    for _ in range(300):
        data = bytearray(compiled.binary)
        for at in (rng.randrange(note - 40, note + 600), rng.randrange(64)):
            data[at] = rng.randrange(256)
        try:
            read_kernel(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]), "double")
        except ValueError:
            continue
