"""explain for a machine that is not this one, from what doctor printed there."""

import json
from pathlib import Path

import pytest

from aotpack.cli.hostfile import LIBRARIES, read_host, write_host
from aotpack.errors import InputError
from aotpack.package import Package
from aotpack.runtime.host import known_symbols
from aotpack.targets import CudaDevice, HostFacts
from tests.process import aotpack, only_object

ARTIFACT = Path(__file__).parent.parent.parent / "artifacts" / "qwen3-8b-dflash.aotpack"
H200 = CudaDevice(name="NVIDIA H200", capability=(9, 0), shared_memory=232448, driver="580.95.05")


@pytest.fixture
def host(tmp_path):
    done = aotpack("doctor", "--json")
    path = tmp_path / "host.json"
    path.write_text(done.stdout)
    return path


def changed(path, **facts):
    data = json.loads(path.read_text())
    data["host"] |= facts
    path.write_text(json.dumps(data))
    return path


def explain(host, device):
    done = aotpack("explain", ARTIFACT, "--host", host, "--device", device, "--json")
    return done.returncode, {row["target"]: row["code"] for row in only_object(done)["variants"]}


def test_facts_are_read_back_as_they_were_written(tmp_path):
    facts = HostFacts(
        machine="x86_64",
        instruction_set="x86_64-v3",
        glibc="2.39",
        libstdcxx="3.4.32",
        torch="2.11.0",
        torch_symbols=frozenset({"aoti_torch_empty_strided"}),
        libraries=frozenset({"libc.so.6"}),
        cuda_devices=(H200,),
    )
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"schema": "aotpack.doctor/1", "host": write_host(facts)}))
    assert read_host(path, ()) == facts
    assert read_host(path, {"libnew.so"}).libraries == {"libc.so.6", "libnew.so"}


def test_the_answer_for_this_machine_is_this_machines(host):
    here = only_object(aotpack("explain", ARTIFACT, "--json"))["variants"]
    there = only_object(aotpack("explain", ARTIFACT, "--host", host, "--json"))["variants"]
    assert here == there


def test_a_build_engineer_can_answer_for_a_node_with_a_gpu(host):
    libraries = {**json.loads(host.read_text())["host"]["libraries"], "libcuda.so.1": True}
    changed(host, cuda_devices=write_host(HostFacts(machine="", cuda_devices=(H200,)))["cuda_devices"])
    changed(host, libraries=libraries)
    code, codes = explain(host, "cuda")
    assert (code, codes["cuda-sm90"], codes["cuda-sm80"]) == (0, "accepted", "capability")
    changed(host, torch_symbols=[])
    assert explain(host, "cuda")[1]["cuda-sm90"] == "torch-symbols"


def test_doctor_knows_every_library_and_symbol_that_our_packages_need():
    with Package.open(ARTIFACT) as package:
        needs = [variant.requires for variant in package.manifest.variants]
    assert {name for need in needs for name in need.needed} <= set(LIBRARIES)
    assert {symbol for need in needs for symbol in need.torch_symbols} <= known_symbols()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "field '(the whole)' is wrong"),
        ("{}", "field 'host' is wrong"),
        ('{"host": {}}', "field 'host.libraries' is wrong"),
    ],
)
def test_another_file_is_refused(tmp_path, text, message):
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_host(path, ())
    assert message in str(caught.value)
    assert "aotpack doctor --json > host.json" in str(caught.value)
