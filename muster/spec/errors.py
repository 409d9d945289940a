"""The ways in which a request or a run can fail, with exit codes."""


class MusterError(Exception):
    """A failure with one clear sentence for its reader; the process ends with `exit_code`."""

    exit_code: int = 1


class ConfigError(MusterError):
    """An error in the request itself: an unknown key, a missing file, a value of the wrong type."""

    exit_code = 2


class InfeasibleError(MusterError):
    """A well-formed request that can't be run: a plan that doesn't fit the model, the batch or the machine."""

    exit_code = 3


class UnreachableError(MusterError):
    """A message that couldn't be sent to another node, because its machine or the network between is down."""
