"""Sections of a job file that only one feature uses: each is read and checked here."""
