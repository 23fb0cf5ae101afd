"""What each option of other trainers is in a job, or why it is nothing there: one table per program."""
