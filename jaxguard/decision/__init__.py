"""Evidence over time, conformal thresholds, and PASS / HOLD / BLOCK. NumPy and SciPy only."""
