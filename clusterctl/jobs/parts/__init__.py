"""The parts of a job file that one feature each reads and checks."""
