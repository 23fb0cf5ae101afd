"""Jobs written from the commands, scripts and configuration files of other trainers; nothing of them is executed."""
