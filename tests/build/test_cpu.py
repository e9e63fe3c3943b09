"""What a CPU build makes, and what it refuses before it compiles anything."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

import aotpack
from aotpack.build import build, elf
from aotpack.errors import InputError, NoVariantError, OutputError, SpecError, TargetError
from aotpack.package import Package
from aotpack.runtime.host import host_facts
from aotpack.runtime.selftest import self_test
from aotpack.spec import AttentionSpec, MaskSpec
from tests.conftest import MASKS

SPEC = AttentionSpec(heads=2, kv_heads=1, head_dim=16, dtype="float32", mask=MaskSpec(family="full"))


@pytest.fixture(scope="module")
def libraries(dflash_package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    found = {}
    with Package.open(dflash_package) as package:
        for program in package.manifest.variants[0].programs:
            found[program.name] = folder / f"{program.name}.so"
            found[program.name].write_bytes(package.read_blob(program.library))
    return found


def test_no_512_bit_register_in_portable_code(libraries: dict[str, Path]) -> None:
    for library in libraries.values():
        text = subprocess.run(
            ["objdump", "-d", str(library)], check=True, capture_output=True, text=True
        ).stdout
        assert "%ymm" in text
        assert "%zmm" not in text


def test_libraries_are_stripped_and_name_no_path(libraries: dict[str, Path]) -> None:
    for library in libraries.values():
        sections = subprocess.run(
            ["readelf", "-SW", str(library)], check=True, capture_output=True, text=True
        ).stdout
        assert ".symtab" not in sections
        assert ".debug" not in sections
        assert b"aotpack-build-" not in library.read_bytes()


def test_requirements_are_those_of_the_binaries(dflash_package: Path, libraries: dict[str, Path]) -> None:
    with Package.open(dflash_package) as package:
        needs = package.manifest.variants[0].requires
    for library in libraries.values():
        assert set(elf.needed(library)) <= set(needs.needed)
        torch_symbols = {s for s in elf.imported_symbols(library) if s.startswith(("aoti_torch_", "torch_"))}
        assert torch_symbols <= set(needs.torch_symbols)
    assert needs.glibc == max(
        (elf.symbol_version(path, "GLIBC") for path in libraries.values()),
        key=lambda v: [int(part) for part in v.split(".")],
    )


def test_specs_that_differ_in_the_mask_share_their_attention(masks_package: Path) -> None:
    with Package.open(masks_package) as package:
        variants = package.manifest.variants
    assert len(variants) == len(MASKS)
    for name in ("forward", "backward"):
        assert len({p.library for v in variants for p in v.programs if p.name == name}) == 1
    assert len({p.library for v in variants for p in v.programs if p.name == "block_mask"}) == len(MASKS)


def test_refusals_come_before_any_compilation(tmp_path: Path) -> None:
    out = tmp_path / "x.aotpack"
    with pytest.raises(TargetError, match="unknown target 'cpu-z80'"):
        build({"full": SPEC}, ["cpu-z80"], out)
    with pytest.raises(InputError, match="nothing to build"):
        build({}, ["cpu"], out)
    with pytest.raises(InputError, match="cannot be a spec's name"):
        build({"../full": SPEC}, ["cpu"], out)
    for unwritable in (tmp_path, tmp_path / "none" / "x.aotpack", Path("/proc/x.aotpack")):
        with pytest.raises(OutputError, match="cannot be written"):
            build({"full": SPEC}, ["cpu"], unwritable)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_mask_family_is_refused_by_name(tmp_path: Path) -> None:
    wrong = dataclasses.replace(SPEC, mask=MaskSpec(family="zigzag"))
    with pytest.raises(SpecError, match="the mask family is unknown"):
        build({"full": wrong}, ["cpu"], tmp_path / "x.aotpack")
    wrong = dataclasses.replace(SPEC, mask=MaskSpec(family="dflash"))
    with pytest.raises(SpecError, match="needs block_size"):
        build({"full": wrong}, ["cpu"], tmp_path / "x.aotpack")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Exception, match="needs the program 'no-such-compiler'") as error:
        build({"full": SPEC}, ["cpu"], tmp_path / "x.aotpack")
    assert type(error.value).__name__ == "HostError"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wide_code_is_a_choice(tmp_path: Path) -> None:
    path = build({"full": SPEC}, ["cpu-x86_64-v4"], tmp_path / "v4.aotpack").path
    library = tmp_path / "forward.so"
    with Package.open(path) as package:
        program = package.manifest.variants[0].program("forward")
        assert program is not None
        library.write_bytes(package.read_blob(program.library))
    assert elf.uses_zmm(library)
    if host_facts().instruction_set == "x86_64-v4":
        assert self_test(path).passed
    else:
        with pytest.raises(NoVariantError, match="instruction-set"):
            aotpack.load(path)
