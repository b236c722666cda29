"""The papers' experiments: runs from one plan, one canonical summary of their outcomes, and all tables from that."""
