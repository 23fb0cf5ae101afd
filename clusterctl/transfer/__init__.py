"""Copy folders to nodes and back: only missing data is sent, and all data is verified."""
