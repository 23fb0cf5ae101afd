"""Measurements of checkpoints: times next to peers, kills, damaged files, full disks, changes of layout."""
