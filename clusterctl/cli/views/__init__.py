"""Views: turn values into tables, texts and progress lines for commands."""
