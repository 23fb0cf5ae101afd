"""Commands that start a job and follow it: over SSH, in a batch system and in pods."""
