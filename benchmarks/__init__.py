"""History and plots of every op with ASV; the gate is ``memfix gate``."""
