"""What a row can't be read as."""


class UnpredictableRowError(Exception):
    """One sentence: why a row can't be predicted, with what was expected."""
