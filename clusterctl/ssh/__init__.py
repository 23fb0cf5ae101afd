"""Reach nodes over SSH, by paramiko or by OpenSSH's own program."""
