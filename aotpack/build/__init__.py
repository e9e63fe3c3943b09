"""Compile specs into a package. Importing this needs no torch; the work happens in a process of its own."""

from aotpack.build.check import check_build
from aotpack.build.pipeline import CALLING_CONVENTION, BuildReport, Stage, build

__all__ = ["CALLING_CONVENTION", "BuildReport", "Stage", "build", "check_build"]
