"""What a config costs: memory, time, `auto`, warnings; imports no torch."""
