"""What `import muster` gives: runs and verbs as Python, and the registers of parts of one's own."""
