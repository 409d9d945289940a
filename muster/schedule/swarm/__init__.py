"""Passes of a step that swarms of peers run: which may run, who gets them, which gradients count."""
