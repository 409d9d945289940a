"""Peers that come and go: one run each, joined by a coordinator; free of torch."""
