"""A seeded corpus of service steps with the way each should go: what a router learns from."""
