"""A record as one strict JSON document: one line a result, so that files compare and read well."""

from __future__ import annotations

import json

from fsample_cli.records import Record


def to_json(record: Record) -> str:
    """JSON text with NaN and infinity as null. `Record.from_dict(json.loads(text))` gives the record back."""
    data = record.to_dict()
    rows = [json.dumps(row, allow_nan=False, ensure_ascii=False) for row in data.pop("results")]
    head = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1)
    body = ",\n  ".join(rows)
    return head.removesuffix("\n}") + ',\n "results": [' + (f"\n  {body}\n ]" if rows else "]") + "\n}\n"
