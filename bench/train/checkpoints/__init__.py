"""Measurements of checkpoints: times compared with peers, kills, damaged files, full disks, changes of layout."""
