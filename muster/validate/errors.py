"""Error of a row that can't be predicted."""


class UnpredictableRowError(Exception):
    """A sentence on why a row can't be predicted, with what was expected."""
