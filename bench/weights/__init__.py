"""Imports and exports of weights, compared with transformers in time and peak memory."""
