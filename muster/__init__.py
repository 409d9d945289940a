"""Muster: plan, predict and run the training of large language models on whatever machines one has."""

__version__ = "0.1.0"
