"""Element types: one spelling for all that files use, and the bytes of each."""

from __future__ import annotations

# as operators ("c10::Half", "long int"), NCCL's arguments ("Half"), the flight recorder ("Float") and NCCL's own
# enumeration ("ncclFloat32") write them, in small letters
_SPELLINGS = {
    "float64": ("double", "float64", "ncclfloat64", "ncclDouble"),
    "float32": ("float", "float32", "ncclfloat32", "ncclFloat"),
    "float16": ("half", "c10::half", "float16", "ncclfloat16", "ncclHalf"),
    "bfloat16": ("bfloat16", "c10::bfloat16", "__nv_bfloat16", "ncclbfloat16"),
    "float8_e4m3": ("float8_e4m3fn", "c10::float8_e4m3fn", "float8_e4m3fnuz", "c10::float8_e4m3fnuz"),
    "float8_e5m2": ("float8_e5m2", "c10::float8_e5m2", "float8_e5m2fnuz", "c10::float8_e5m2fnuz"),
    "complex64": ("c10::complex<float>", "complexfloat", "complex64"),
    "complex128": ("c10::complex<double>", "complexdouble", "complex128"),
    "int64": ("long", "long int", "int64", "ncclint64"),
    "int32": ("int", "int32", "ncclint32", "ncclInt"),
    "int16": ("short", "short int", "int16"),
    "int8": ("char", "signed char", "int8", "ncclint8"),
    "uint64": ("unsigned long", "uint64", "ncclUint64"),
    "uint32": ("unsigned int", "uint32", "ncclUint32"),
    "uint16": ("unsigned short", "uint16"),
    "uint8": ("byte", "unsigned char", "uint8", "ncclUint8"),
    "bool": ("bool",),
}
_BY_SPELLING = {text.lower(): dtype for dtype, texts in _SPELLINGS.items() for text in texts}
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}

ITEM_BYTES_OF: dict[str, int] = {
    dtype: 1 if dtype == "bool" or "float8" in dtype else _BYTES["".join(filter(str.isdigit, dtype))]
    for dtype in _SPELLINGS
}
"""Bytes of one element, by the names of ``table.DTYPE``."""


def dtype_named(text: str | None) -> str | None:
    """The name in ``table.DTYPE`` of whatever a file calls it, None for what is no element type."""
    return _BY_SPELLING.get(text.lower()) if text else None
