"""From a model that calls flex_attention to the specs that it needs: run once, record every call."""

from aotpack.recording.capture import capture
from aotpack.recording.result import Call, Captured

__all__ = ["Call", "Captured", "capture"]
