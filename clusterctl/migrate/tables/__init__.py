"""How each option of other trainers is translated into a job, or why it is not: one table per program."""
