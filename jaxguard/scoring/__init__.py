"""Scoring of trace archives: streaming, every record accounted for."""
