"""Two-stage training: the world model first, then risk supervision on its predicted states."""
