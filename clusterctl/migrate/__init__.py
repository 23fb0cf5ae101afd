"""Write jobs from the commands, scripts and configuration files of other trainers, without executing any of them."""
