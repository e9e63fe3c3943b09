import itertools
import platform
from dataclasses import dataclass, replace

import pytest

from aotpack.errors import HostError, InputError, NoVariantError, TargetError
from aotpack.targets import (
    CudaDevice,
    CudaRequirements,
    HostFacts,
    Kernel,
    Reason,
    Requirements,
    Target,
    choose,
    cpu_flags,
    driver_floor,
    instruction_set,
    match,
)

NAMES = (
    "cpu-x86_64-v3, cpu-x86_64-v4, cpu-aarch64, "
    "cuda-sm80, cuda-sm86, cuda-sm89, cuda-sm90, cuda-sm100, cuda-sm120"
)
HASWELL = [
    "fpu",
    "cx8",
    "cmov",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "syscall",
    "pni",
    "ssse3",
    "cx16",
    "sse4_1",
    "sse4_2",
    "movbe",
    "popcnt",
    "xsave",
    "avx",
    "f16c",
    "lahf_lm",
    "abm",
    "bmi1",
    "avx2",
    "bmi2",
    "fma",
]
SKYLAKE = [*HASWELL, "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"]
H200 = CudaDevice(name="NVIDIA H200", capability=(9, 0), shared_memory=232448, driver="580.95.05")
A100 = replace(H200, name="A100", capability=(8, 0), shared_memory=166912)
L40 = replace(H200, name="L40", capability=(8, 9), shared_memory=101376)
HOST = HostFacts(
    machine="x86_64",
    instruction_set="x86_64-v4",
    glibc="2.36",
    libstdcxx="3.4.30",
    torch="2.14.1",
    torch_symbols=frozenset({"aoti_torch_a"}),
    libraries=frozenset({"libtorch_cpu.so"}),
    cuda_devices=(H200, A100),
)
V3_HOST = replace(HOST, instruction_set="x86_64-v3")
CPU = Requirements(
    instruction_set="x86_64-v3",
    glibc="2.34",
    libstdcxx="3.4.21",
    needed=("libtorch_cpu.so",),
    torch_symbols=("aoti_torch_a",),
)


def cuda(capability="9.0", shared_memory=100_000, driver="580"):
    kernel = Kernel(name="flex", shared_memory=shared_memory)
    facts = CudaRequirements(capability=capability, kernels=(kernel,), driver=driver)
    return replace(CPU, cuda=facts)


@dataclass(frozen=True)
class Built:
    target: str
    requires: Requirements = CPU


@pytest.mark.parametrize("name", NAMES.split(", "))
def test_a_full_name_parses_and_prints(name):
    assert str(Target.parse(name)) == name
    assert Target.parse(name) in Target.known()


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(TargetError) as caught:
        Target.parse("cuda-sm70")
    assert str(caught.value) == (
        f"unknown target 'cuda-sm70'\n  expected: one of {NAMES}\n  what to do: name the target in full"
    )


@pytest.mark.parametrize(
    "name", ["", "-", "tpu", "cpu-", "CPU", "cuda-90", "cpu-x86_64", "cuda-sm90 ", "cuda\n"]
)
def test_other_words_are_not_targets(name):
    with pytest.raises(TargetError):
        Target.parse(name)


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("x86_64", "cpu-x86_64-v3"),
        ("AMD64", "cpu-x86_64-v3"),
        ("aarch64", "cpu-aarch64"),
        ("arm64", "cpu-aarch64"),
    ],
)
def test_cpu_alone_is_the_portable_target_of_the_machine(machine, name):
    assert str(Target.parse("cpu", machine=machine)) == name


def test_cpu_alone_means_this_machine():
    assert Target.parse("cpu") == Target.parse("cpu", machine=platform.machine())


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm80"),
        ((8, 6), "sm86"),
        ((8, 7), "sm86"),
        ((8, 9), "sm89"),
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((10, 3), "sm100"),
        ((12, 0), "sm120"),
        ((12, 1), "sm120"),
    ],
)
def test_cuda_alone_is_the_tightest_target_that_runs_on_the_device(capability, name):
    target = Target.parse("cuda", capability=capability)
    assert str(target) == f"cuda-{name}"
    assert target.capability is not None
    assert target.capability[0] == capability[0]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"text": "cuda"}, "no CUDA device on this machine"),
        ({"text": "cuda", "capability": (7, 5)}, "a device of capability 7.5"),
        ({"text": "cpu", "machine": "riscv64"}, "a machine of type riscv64"),
    ],
)
def test_machine_without_a_target_is_told_so(arguments, found):
    with pytest.raises(TargetError) as caught:
        Target.parse(**arguments)
    assert str(caught.value) == (
        f"'{arguments['text']}' alone names no target here\n  expected: one of {NAMES}\n  found: {found}\n"
        "  what to do: name the target in full"
    )


def test_cpu_target_has_no_capability():
    assert Target.parse("cpu-aarch64").capability is None


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", SKYLAKE, "x86_64-v4"),
        ("x86_64", HASWELL, "x86_64-v3"),
        ("x86_64", [f for f in SKYLAKE if f != "avx512vl"], "x86_64-v3"),
        ("x86_64", [f for f in SKYLAKE if f != "fma"], "x86_64-v2"),
        ("x86_64", [f for f in HASWELL if f != "popcnt"], "x86_64-v1"),
        ("x86_64", [], None),
        ("aarch64", ["asimd"], "aarch64"),
        ("riscv64", SKYLAKE, None),
    ],
)
def test_instruction_set_is_the_highest_level_that_is_whole(machine, flags, level):
    assert instruction_set(machine, flags) == level


def test_flags_are_those_that_every_processor_has():
    assert cpu_flags("flags\t\t: a b c\nx : y\nflags\t: b c d\n") == {"b", "c"}
    assert cpu_flags("Features\t: asimd fp\n") == {"asimd", "fp"}
    assert cpu_flags("vmx flags\t: a\n") == frozenset()


@pytest.mark.parametrize(
    ("release", "floor"), [("12.0", "525"), ("12.9", "525"), ("13.0", "580"), ("11.8", None)]
)
def test_driver_floor(release, floor):
    assert driver_floor(release) == floor


@pytest.mark.parametrize(
    ("target", "requires", "host", "device", "code", "reason"),
    [
        ("cpu-x86_64-v3", CPU, HOST, "cpu", "accepted", "runs here"),
        ("cuda-sm90", cuda(), HOST, "cuda", "accepted", "runs here"),
        ("cuda-sm90", cuda("9.0a"), HOST, "cuda:0", "accepted", "runs here"),
        ("cuda-sm80", cuda("8.0"), HOST, "cuda:1", "accepted", "runs here"),
        ("cuda-sm90", Requirements(), HOST, "cuda:0", "accepted", "runs here"),
        ("cpu-riscv", CPU, HOST, "cpu", "unknown-target", "this aotpack does not know the target"),
        ("cpu", CPU, HOST, "cpu", "unknown-target", "this aotpack does not know the target"),
        ("cuda", CPU, HOST, "cuda", "unknown-target", "this aotpack does not know the target"),
        ("cpu-x86_64-v3", CPU, HOST, "cuda", "device-type", "built for cpu, and cuda was asked for"),
        ("cuda-sm90", cuda(), HOST, "cpu", "device-type", "built for cuda, and cpu was asked for"),
        ("cpu-aarch64", Requirements(), HOST, "cpu", "machine",
         "built for aarch64 machines, this one is x86_64"),
        ("cpu-x86_64-v3", CPU, replace(HOST, machine="aarch64", instruction_set="aarch64"), "cpu", "machine",
         "built for x86_64 machines, this one is aarch64"),
        ("cuda-sm90", cuda(), replace(HOST, machine="aarch64", instruction_set=None), "cuda", "machine",
         "built for x86_64 machines, this one is aarch64"),
        ("cpu-x86_64-v4", CPU, V3_HOST, "cpu", "instruction-set",
         "needs x86_64-v4 instructions, this CPU has x86_64-v3"),
        ("cpu-x86_64-v3", replace(CPU, instruction_set="x86_64-v4"), V3_HOST, "cpu", "instruction-set",
         "needs x86_64-v4 instructions, this CPU has x86_64-v3"),
        ("cuda-sm90", cuda(), replace(HOST, instruction_set="x86_64-v2"), "cuda", "instruction-set",
         "needs x86_64-v3 instructions, this CPU has x86_64-v2"),
        ("cuda-sm90", cuda(), HOST, "cuda:2", "no-device", "needs CUDA device 2, this machine has 2 of them"),
        ("cuda-sm90", cuda(), HOST, "cuda:1", "capability", "built for capability 9.0, A100 has 8.0"),
        ("cuda-sm80", cuda("8.0"), HOST, "cuda:0", "capability",
         "built for capability 8.0, NVIDIA H200 has 9.0"),
        ("cuda-sm80", Requirements(), HOST, "cuda:0", "capability",
         "built for capability 8.0, NVIDIA H200 has 9.0"),
        ("cuda-sm80", cuda("8.0", 150_000), replace(HOST, cuda_devices=(L40,)), "cuda", "shared-memory",
         "kernel flex needs 150000 bytes of shared memory a block, L40 has 101376"),
        ("cuda-sm90", cuda(), replace(HOST, cuda_devices=(replace(H200, driver="570.10"),)), "cuda", "driver",
         "needs driver 580 or newer, this machine has 570.10"),
        ("cpu-x86_64-v3", CPU, replace(HOST, glibc="2.31"), "cpu", "glibc",
         "needs glibc 2.34 or newer, this machine has 2.31"),
        ("cpu-x86_64-v3", CPU, replace(HOST, glibc=None), "cpu", "glibc",
         "needs glibc 2.34 or newer, this machine has none"),
        ("cpu-x86_64-v3", CPU, replace(HOST, libstdcxx="3.4.9"), "cpu", "libstdcxx",
         "needs libstdc++ with GLIBCXX_3.4.21, this machine's ends at 3.4.9"),
        ("cpu-x86_64-v3", CPU, replace(HOST, libraries=frozenset()), "cpu", "library",
         "needs libraries that are not here: libtorch_cpu.so"),
        ("cpu-x86_64-v3", replace(CPU, torch_symbols=tuple("abcde")), HOST, "cpu", "torch-symbols",
         "torch 2.14.1 lacks a, b, c and 2 more"),
    ],
)  # fmt: skip
def test_decision(target, requires, host, device, code, reason):
    decision = match(requires, target, host, device)
    assert (decision.code, decision.reason) == (code, reason)
    assert decision.accepted == (code == "accepted")
    assert str(decision) == f"{target}: {reason} [{code}]"


@pytest.mark.parametrize("fact", ["instruction_set", "libstdcxx", "torch", "torch_symbols", "libraries"])
def test_fact_that_is_not_known_is_not_held_against_a_variant(fact):
    assert match(CPU, "cpu-x86_64-v3", replace(HOST, **{fact: None}), "cpu").accepted


@pytest.mark.parametrize("device", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:0\n"])
def test_unknown_device_is_an_error_of_the_call(device):
    with pytest.raises(InputError, match="unknown device"):
        match(CPU, "cpu-x86_64-v3", HOST, device)


@pytest.mark.parametrize("built", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("device", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("suffix", ["", "a", "f"])
def test_cubin_rule(built, device, suffix):
    host = replace(HOST, cuda_devices=(replace(H200, capability=device),))
    requires = cuda(f"{built[0]}.{built[1]}{suffix}")
    runs = built == device or (suffix != "a" and built[0] == device[0] and built[1] < device[1])
    assert match(requires, "cuda-sm90", host, "cuda").accepted == runs


def test_matrix_of_machines_and_targets():
    levels = ["x86_64-v1", "x86_64-v2", "x86_64-v3", "x86_64-v4", "aarch64"]
    devices = [None, A100, L40, H200]
    for level, device, target in itertools.product(levels, devices, Target.known()):
        machine = level.partition("-v")[0]
        host = HostFacts(
            machine=machine, instruction_set=level, glibc="2.36", cuda_devices=(device,) if device else ()
        )
        requires = replace(CPU, instruction_set="aarch64" if target.arch == "aarch64" else "x86_64-v3")
        decision = match(requires, str(target), host, target.device)
        if target.device == "cpu":
            expected = level == target.arch or (level, target.arch) == ("x86_64-v4", "x86_64-v3")
        else:
            right = device and target.capability[0] == device.capability[0]
            runs = right and target.capability[1] <= device.capability[1]
            expected = bool(runs and level in ("x86_64-v3", "x86_64-v4"))
        assert decision.accepted == expected, (level, device, target, decision)


def test_tightest_variant_is_taken_whatever_the_order():
    variants = [Built("cpu-x86_64-v3"), Built("cpu-x86_64-v4"), Built("cuda-sm90", cuda())]
    for order in itertools.permutations(variants):
        choice = choose(order, HOST, "cpu")
        assert choice.variant.target == "cpu-x86_64-v4"
        assert [d.target for d in choice.decisions] == [v.target for v in order]
    assert choose(variants, V3_HOST, "cpu").variant.target == "cpu-x86_64-v3"


def test_nearest_capability_is_taken_and_a_suffix_before_none():
    host = replace(HOST, cuda_devices=(L40,))
    variants = [
        Built("cuda-sm89", cuda("8.9")),
        Built("cuda-sm80", cuda("8.0")),
        Built("cuda-sm86", cuda("8.6")),
    ]
    assert choose(variants, host, "cuda").variant.target == "cuda-sm89"
    assert choose(variants[1:], host, "cuda").variant.target == "cuda-sm86"
    plain, suffixed = Built("cuda-sm90", cuda("9.0")), Built("cuda-sm90", cuda("9.0a"))
    assert choose([plain, suffixed], HOST, "cuda").variant is suffixed


def test_refusal_names_every_variant_with_its_reason():
    variants = [Built("cpu-x86_64-v3"), Built("cuda-sm80", cuda("8.0"))]
    with pytest.raises(NoVariantError) as caught:
        choose(variants, HOST, "cuda:0")
    assert str(caught.value) == (
        "no variant runs on cuda:0\n"
        "  expected: a variant for cuda:0 (NVIDIA H200, capability 9.0, on x86_64-v4)\n"
        "  found: \n"
        "    cpu-x86_64-v3: built for cpu, and cuda was asked for [device-type]\n"
        "    cuda-sm80: built for capability 8.0, NVIDIA H200 has 9.0 [capability]\n"
        "  what to do: build the package with --target cuda-sm90 as well"
    )


def test_machine_in_the_way_of_a_right_variant_is_an_error_of_the_machine():
    host = replace(HOST, glibc="2.31", cuda_devices=())
    with pytest.raises(HostError) as caught:
        choose([Built("cpu-x86_64-v3"), Built("cpu-aarch64", Requirements())], host, "cpu")
    assert str(caught.value) == (
        "no variant runs on cpu, but one would if this machine were changed\n"
        "  expected: a variant for cpu (x86_64-v4)\n"
        "  found: \n"
        "    cpu-x86_64-v3: needs glibc 2.34 or newer, this machine has 2.31 [glibc]\n"
        "    cpu-aarch64: built for aarch64 machines, this one is x86_64 [machine]\n"
        "  what to do: use a system with a newer glibc, or build the package on an older one"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"glibc": "2.0"}, Reason.GLIBC),
        ({"libstdcxx": "3.4"}, Reason.LIBSTDCXX),
        ({"libraries": frozenset()}, Reason.LIBRARY),
        ({"torch_symbols": frozenset()}, Reason.TORCH_SYMBOLS),
        ({"cuda_devices": (replace(H200, driver="535"),)}, Reason.DRIVER),
        ({"cuda_devices": ()}, Reason.NO_DEVICE),
    ],
)
def test_what_the_user_can_mend_on_the_machine_exits_with_5(change, code):
    host = replace(HOST, **change)
    assert match(cuda(), "cuda-sm90", host, "cuda").code == code
    with pytest.raises(HostError) as caught:
        choose([Built("cuda-sm90", cuda())], host, "cuda")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:7"])
def test_no_variants_at_all(device):
    with pytest.raises(NoVariantError) as caught:
        choose([], HOST, device)
    assert caught.value.found == "no variant at all"


def test_machine_without_any_target_is_not_told_to_build_for_one():
    host = HostFacts(machine="riscv64", glibc="2.36")
    with pytest.raises(NoVariantError) as caught:
        choose([Built("cpu-x86_64-v3")], host, "cpu")
    assert caught.value.remedy == "build the package with a target for this machine as well"
