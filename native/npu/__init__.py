"""Ascend: no op of its own yet, so the reference serves it and the report says so."""
