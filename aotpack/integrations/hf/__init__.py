"""The parts of ``aotpack.integrations.transformers``."""
