"""A record as CSV, one line a result. Raw samples stay in the JSON form; all other values are in full."""

from __future__ import annotations

from fsample_cli.records import Record


def to_csv(record: Record) -> str:
    """CSV with a header line; the workload's columns come first, the GPU and the commit last."""
    frame = record.to_frame()
    frame = frame.drop(columns=[name for name in ("samples_us",) if name in frame.columns])
    if record.environment is not None:
        for name in ("gpu", "commit", "date"):
            if name not in frame.columns:
                frame[name] = getattr(record.environment, name)
    return str(frame.to_csv(index=False, lineterminator="\n"))
