"""What starts the ranks of a run: SSH, a batch system, or the pods of a platform."""
