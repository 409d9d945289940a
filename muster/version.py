"""The version of Muster."""

__version__ = "0.1.0"
