"""Tuning as data: which kernel options were measured to be best, on which chip, and for what."""

from aotpack.tuning.candidates import Candidate, CandidateSet, Group
from aotpack.tuning.choice import best
from aotpack.tuning.options import CLASSES, DIRECTIONS, KERNELS, Options, unfit
from aotpack.tuning.record import Attention, Chip, Entry, Measured, Record, Timed
from aotpack.tuning.tuned import Choice, Frozen, Records, Tuning, to_provenance

__all__ = [
    "CLASSES",
    "DIRECTIONS",
    "KERNELS",
    "Attention",
    "Candidate",
    "CandidateSet",
    "Chip",
    "Choice",
    "Entry",
    "Frozen",
    "Group",
    "Measured",
    "Options",
    "Record",
    "Records",
    "Timed",
    "Tuning",
    "best",
    "to_provenance",
    "unfit",
]
