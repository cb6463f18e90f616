"""One file a command: parse, call, report."""
