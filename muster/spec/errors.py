"""The two ways in which a request can be wrong, with the exit code that each ends in."""


class MusterError(Exception):
    """A failure with one clear sentence for the person who reads it; `exit_code` is what the process ends with."""

    exit_code: int = 1


class ConfigError(MusterError):
    """The request itself is wrong: an unknown key, a missing file, a value of the wrong type."""

    exit_code = 2


class InfeasibleError(MusterError):
    """The request is well-formed but can't be run: a plan that doesn't fit the model, the batch or the machine."""

    exit_code = 3
