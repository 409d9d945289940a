"""Comparison of predictions with published measurements: tables, meaning of their rows, scores. Imports no torch."""
