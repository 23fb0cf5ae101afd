"""Texts become .bin/.idx files; every verb of `clusterctl data`."""
