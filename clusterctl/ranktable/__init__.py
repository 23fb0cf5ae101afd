"""RANK_TABLE_FILE as a value: read, checked by HCCL's rules, built, compared, put on nodes."""
