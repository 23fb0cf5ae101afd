"""The command line: one short file a noun, each command load, do, show."""
