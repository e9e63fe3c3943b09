"""Every error aotpack raises on purpose: one class per thing a user can do about it."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AotpackError",
    "BuildError",
    "HostError",
    "InputError",
    "IntegrityError",
    "MismatchError",
    "NoVariantError",
    "OfflineError",
    "OutputError",
    "SelfTestError",
    "SpecError",
    "TargetError",
    "TracingError",
    "TrustError",
    "UnsupportedError",
]


class AotpackError(Exception):
    """Root of all errors of aotpack.

    Args:
        problem: what is wrong, one sentence.
        expected: what would have been right.
        found: what was there instead.
        remedy: what the user can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        problem: str,
        *,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def diagnostics(self) -> dict[str, str]:
        """The parts of the message that are present, in the order they are printed."""
        parts = {"expected": self.expected, "found": self.found, "what to do": self.remedy}
        return {name: str(value) for name, value in parts.items() if value is not None}

    def __str__(self) -> str:
        lines = [self.problem, *(f"{k}: {v}" for k, v in self.diagnostics().items())]
        return "\n  ".join(lines)


class SpecError(AotpackError):
    """A spec or drafter config that cannot be built from: mend the config."""

    exit_code = 2


class TargetError(AotpackError):
    """A target name that is unknown: choose one of the listed names."""

    exit_code = 2


class InputError(AotpackError, ValueError):
    """A call with tensors or arguments that do not fit the spec: mend the call."""

    exit_code = 2


class UnsupportedError(AotpackError, NotImplementedError):
    """Something asked for that aotpack does not do: do it another way."""

    exit_code = 2


class OutputError(AotpackError):
    """A path that cannot be written: choose another path."""

    exit_code = 2


class NoVariantError(AotpackError):
    """No variant of the package runs on this machine: build for this target.

    Raised before any library is opened; the message names every variant and the reason.
    """

    exit_code = 3


class MismatchError(NoVariantError):
    """The package was built for another spec: load the right package or rebuild."""


class IntegrityError(AotpackError):
    """Bytes that are not what the manifest says: fetch the package again."""

    exit_code = 4


class TrustError(IntegrityError):
    """A package that the policy does not trust: fetch the one that is meant, or change the policy.

    Raised before any library is opened; the message says what the policy asks for and what was found.
    """


class HostError(AotpackError):
    """The machine lacks something: install it or change the environment."""

    exit_code = 5


class TracingError(AotpackError):
    """Something began to trace or compile inside ``aotpack.no_tracing()``: the message has its stack."""


class BuildError(AotpackError):
    """A compilation that failed although its input was right."""


class OfflineError(AotpackError):
    """Something is not cached and the network may not be used: fetch it first."""

    exit_code = 6


class SelfTestError(AotpackError):
    """Results that are further from the golden vectors than the manifest allows."""

    exit_code = 7
