"""A Trace out to pandas, and to a folder of Parquet and back, every column and type as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from ..base.errors import TraceError
from ..base.provenance import Provenance
from .table import CLOCK_SCHEMA, GROUP_SCHEMA, LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Context, Note, Trace

if TYPE_CHECKING:
    import pandas

_TABLES = {
    "spans": SPAN_SCHEMA,
    "lanes": LANE_SCHEMA,
    "steps": STEP_SCHEMA,
    "groups": GROUP_SCHEMA,
    "clock": CLOCK_SCHEMA,
}
_CONTEXT = {"whole_spans": "spans", "whole_steps": "steps"}  # of a selection: Trace.context
_REST = "trace.json"
_PANDAS = {
    pl.Boolean: "boolean",
    pl.Int16: "Int16",
    pl.Int32: "Int32",
    pl.Int64: "Int64",
    pl.Float64: "Float64",
    pl.String: "string",
}


def pandas_frame(frame: pl.DataFrame) -> pandas.DataFrame:
    """The same columns with pandas' own nullable types (Int64, string, boolean, …), enumerations as categories and
    lists as Python lists, so that a column's type never depends on whether a value is missing.

    Raises TraceError where pandas is not installed; it is no dependency of fsdpviz.
    """
    try:
        import pandas
    except ImportError as error:
        raise TraceError("to_pandas needs pandas, which is not installed; run: pip install pandas") from error
    columns: dict[str, Any] = {}
    for series in frame:
        if isinstance(series.dtype, pl.Enum):
            codes = series.to_physical().cast(pl.Int32).fill_null(-1).to_numpy()
            columns[series.name] = pandas.Categorical.from_codes(codes, categories=series.dtype.categories.to_list())
        elif series.dtype in (pl.Int16, pl.Int32, pl.Int64):
            values, is_null = series.fill_null(0).to_numpy(writable=True), series.is_null().to_numpy(writable=True)
            columns[series.name] = pandas.arrays.IntegerArray(values, is_null)
        else:
            kind = _PANDAS.get(series.dtype.base_type(), "object")
            columns[series.name] = pandas.Series(series.to_list(), dtype=kind)
    return pandas.DataFrame(columns)


def write_folder(trace: Trace, folder: str | Path) -> Path:
    """Writes ``spans.parquet``, ``lanes.parquet``, ``steps.parquet``, ``groups.parquet``, ``clock.parquet`` and
    ``trace.json`` (provenance, notes, about) into a folder, which is made; returns it. Of a selection also
    ``whole_spans.parquet`` and ``whole_steps.parquet``, on which its numbers depend (``Trace.context``).

    Raises TraceError where the folder cannot be written, or holds files of something else.
    """
    folder = Path(folder)
    ours = {_REST, *(f"{name}.parquet" for name in (*_TABLES, *_CONTEXT))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(child.name for child in folder.iterdir() if child.name not in ours)
        if others:
            raise TraceError(f"a trace is written into a folder of its own; {folder} holds {others[0]}")
        (folder / _REST).unlink(missing_ok=True)  # until all is written, it is no trace
        for name in _TABLES:
            getattr(trace, name).write_parquet(folder / f"{name}.parquet")
        for name, table in _CONTEXT.items():
            if trace.context is None:
                (folder / f"{name}.parquet").unlink(missing_ok=True)
            else:
                getattr(trace.context, table).write_parquet(folder / f"{name}.parquet")
        rest = {
            "provenance": trace.provenance.value,
            "notes": [[note.what, note.count, note.example] for note in trace.notes],
            "about": dict(trace.about),
            "is_selection": trace.context is not None,
            "bounds_ns": trace.context.bounds_ns if trace.context else None,
            "asked": trace.context.asked if trace.context else None,
        }
        (folder / _REST).write_text(json.dumps(rest), encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise TraceError(f"{folder} cannot be written: {str(error)[:200]}") from error
    return folder


def read_folder(folder: str | Path) -> Trace:
    """What ``write_folder`` wrote. Raises TraceError, one line, for anything else."""
    folder = Path(folder)
    if not (folder / _REST).is_file():
        raise TraceError(f"{folder} is no trace written by write_parquet: it has no {_REST}")
    try:
        rest = dict(json.loads((folder / _REST).read_text(encoding="utf-8")))
        names = [*_TABLES, *_CONTEXT] if rest.get("is_selection") else [*_TABLES]
        frames = {name: pl.read_parquet(folder / f"{name}.parquet") for name in names}
        bounds_ns = tuple(map(int, rest["bounds_ns"])) if rest.get("bounds_ns") else None
        asked = tuple(map(int, rest["asked"])) if rest.get("asked") is not None else None
        provenance = Provenance(rest["provenance"])
        notes = tuple(Note(str(what), int(count), str(example)) for what, count, example in rest["notes"])
        about = dict(rest["about"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pl.exceptions.PolarsError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise TraceError(f"{folder} is a damaged trace: {cause[:200]}") from error
    for name, frame in frames.items():
        if dict(frame.schema) != _TABLES[_CONTEXT.get(name, name)]:
            raise TraceError(f"{folder} was written by another version of fsdpviz: its {name} have other columns")
    if bounds_ns is not None and len(bounds_ns) != 2:
        raise TraceError(f"{folder} is a damaged trace: its bounds_ns are {bounds_ns}")
    of_context = {table: frames.pop(name) for name, table in _CONTEXT.items() if name in frames}
    context = Context(**of_context, bounds_ns=bounds_ns, asked=asked) if of_context else None
    return Trace(**frames, provenance=provenance, notes=notes, about=about, context=context)
