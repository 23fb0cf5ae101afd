"""Imports and exports of weights next to transformers: time and peak memory."""
