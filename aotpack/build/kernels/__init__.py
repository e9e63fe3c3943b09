"""Attention kernels of our own, in Triton, for masks whose structure says what a tile sees."""
