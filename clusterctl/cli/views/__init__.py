"""What commands show: values turned into tables, texts and lines of progress; no command is defined here."""
