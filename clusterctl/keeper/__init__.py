"""Keep connections to nodes open between commands."""
