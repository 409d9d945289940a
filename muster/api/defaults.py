"""Default values of verbs' arguments."""

SEQ_LEN = 4096
"""Tokens of a sequence, or the model's maximum if that is less."""
MICRO_BATCHES_PER_PIPELINE_RANK = 8
"""Micro-batches for each pipeline rank, for a prediction without a batch size."""
SEARCH_EFFORT = 1.0
"""Work after which a search for plans stops with its results so far, and says which better plans it may have missed: 1
is about 8 seconds of a quiet machine with two cores."""
DEFAULT_SAMPLES = 256
"""Samples of each source that `muster eval` reads."""

FRAMEWORK_NAMES = ("muster", "megatron", "torchtitan", "deepspeed")
"""Frameworks of `muster.spec.frameworks`, the default first."""
