"""Device types, the facts that decide where a variant runs, and the decision."""

from aotpack.targets.facts import (
    CudaDevice,
    CudaRequirements,
    HostFacts,
    Kernel,
    Requirements,
    cpu_flags,
    driver_floor,
    instruction_set,
)
from aotpack.targets.matching import Choice, Decision, Reason, choose, match
from aotpack.targets.target import Target

__all__ = [
    "Choice",
    "CudaDevice",
    "CudaRequirements",
    "Decision",
    "HostFacts",
    "Kernel",
    "Reason",
    "Requirements",
    "Target",
    "choose",
    "cpu_flags",
    "driver_floor",
    "instruction_set",
    "match",
]
