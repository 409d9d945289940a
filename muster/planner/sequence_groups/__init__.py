"""Assignment of sequences of unequal lengths to groups of context-parallel ranks of different sizes."""
