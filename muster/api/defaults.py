"""What verbs take where nobody says otherwise."""

SEQ_LEN = 4096
"""Tokens of a sequence, or as many as the model can take."""
MICRO_BATCHES_PER_PIPELINE_RANK = 8
"""Of each pipeline rank, where a prediction is given no batch size."""
SEARCH_TIME_LIMIT_S = 8.0
"""After so long a search for plans stops with what it has, and says what may be missed."""
