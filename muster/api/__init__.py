"""Python interface of `import muster`: runs and verbs, and the registration of plugins."""
