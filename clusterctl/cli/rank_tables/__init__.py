"""Commands on rank tables and host files."""
