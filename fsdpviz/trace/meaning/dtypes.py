"""Element types: one spelling for all that files use, and the bytes of each."""

from __future__ import annotations

# Bytes of one element, and its spellings, whose case is of no account: those of operators ("c10::Half", "long int";
# "long" from another compiler), NCCL's arguments ("Half"), the flight recorder ("Float") and NCCL's own enumeration
# ("ncclFloat32").
_TYPES: dict[str, tuple[int, tuple[str, ...]]] = {
    "float64": (8, ("double", "float64", "ncclFloat64", "ncclDouble")),
    "float32": (4, ("float", "float32", "ncclFloat32", "ncclFloat")),
    "float16": (2, ("half", "c10::Half", "float16", "ncclFloat16", "ncclHalf")),
    "bfloat16": (2, ("bfloat16", "c10::BFloat16", "__nv_bfloat16", "ncclBfloat16")),
    "float8_e4m3": (
        1,
        ("Float8_e4m3fn", "c10::Float8_e4m3fn", "Float8_e4m3fnuz", "c10::Float8_e4m3fnuz", "ncclFloat8e4m3"),
    ),
    "float8_e5m2": (
        1,
        ("Float8_e5m2", "c10::Float8_e5m2", "Float8_e5m2fnuz", "c10::Float8_e5m2fnuz", "ncclFloat8e5m2"),
    ),
    "float8_e8m0": (1, ("Float8_e8m0fnu", "c10::Float8_e8m0fnu")),
    "float4_e2m1_x2": (1, ("Float4_e2m1fn_x2", "c10::Float4_e2m1fn_x2")),  # two numbers an element
    "complex32": (4, ("ComplexHalf", "c10::complex<c10::Half>", "complex32")),
    "complex64": (8, ("ComplexFloat", "c10::complex<float>", "complex64")),
    "complex128": (16, ("ComplexDouble", "c10::complex<double>", "complex128")),
    "int64": (8, ("long", "long int", "int64", "ncclInt64")),
    "int32": (4, ("int", "int32", "ncclInt32", "ncclInt")),
    "int16": (2, ("short", "short int", "int16")),
    "int8": (1, ("char", "signed char", "int8", "ncclInt8", "ncclChar")),
    "uint64": (8, ("unsigned long", "long unsigned int", "uint64", "ncclUint64")),
    "uint32": (4, ("unsigned int", "uint32", "ncclUint32")),
    "uint16": (2, ("unsigned short", "short unsigned int", "uint16")),
    "uint8": (1, ("byte", "unsigned char", "uint8", "ncclUint8")),
    "bool": (1, ("bool",)),
}
_BY_SPELLING = {text.lower(): dtype for dtype, (_, texts) in _TYPES.items() for text in texts}

ITEM_BYTES_OF: dict[str, int] = {dtype: item_bytes for dtype, (item_bytes, _) in _TYPES.items()}
"""Bytes of one element, by the names of ``table.DTYPE``."""


def dtype_named(text: str | None) -> str | None:
    """The name in ``table.DTYPE`` of whatever a file calls it, None for what is no element type."""
    return _BY_SPELLING.get(text.lower()) if text else None
