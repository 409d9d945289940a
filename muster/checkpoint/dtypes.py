"""Dtypes that checkpoints can hold: their names in torch and in safetensors, and their sizes; free of torch."""

from muster.spec.errors import MusterError

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises MusterError for a dtype that checkpoints can't hold."""
    if dtype not in SAFETENSORS_NAMES:
        raise MusterError(f"a checkpoint can't hold {dtype}: expected one of {', '.join(SAFETENSORS_NAMES)}")
    return _BYTES.get(dtype, 1)
