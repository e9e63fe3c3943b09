"""What ``aotpack demo`` runs: a small DFlash drafter that learns from threads on a compiled package."""
