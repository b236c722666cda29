"""Text in: agent traces of any known format to trajectories, and leak-free splits of them. No JAX."""
