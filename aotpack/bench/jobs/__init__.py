"""What the measuring processes do; each function takes and returns JSON values."""
