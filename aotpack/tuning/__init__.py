"""Tuning as data: which kernel options were measured to be best, on which chip, and for what."""

from aotpack.tuning.candidates import Candidate, CandidateSet, Group
from aotpack.tuning.choice import best, mean
from aotpack.tuning.entry import Attention, Chip, Entry, Measured, Timed
from aotpack.tuning.options import CLASSES, DIRECTIONS, KERNELS, Options, ordered, unfit
from aotpack.tuning.record import Record, printable
from aotpack.tuning.tuned import Choice, Frozen, Records, Tuning, Used, to_provenance, used_records

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
    "Used",
    "best",
    "mean",
    "ordered",
    "printable",
    "to_provenance",
    "unfit",
    "used_records",
]
