"""Pods that a platform starts: each starts its own ranks, and Kubernetes submits them."""
