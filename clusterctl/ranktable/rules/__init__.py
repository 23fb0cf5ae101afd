"""HCCL's rules for the content of a rank table: one table of fields, and what only several entries together show."""
