"""Simple guards on the same inputs: what a result has to be compared with."""
