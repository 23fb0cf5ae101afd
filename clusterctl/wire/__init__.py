"""Values that cross a process or a file, each declared once. Only the standard library is needed here."""
