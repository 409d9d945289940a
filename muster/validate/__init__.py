"""Predictions held against published measurements: tables, what a row means, scores. Imports no torch."""
