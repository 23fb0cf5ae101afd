"""Evaluation of a checkpoint on local files: perplexity, LAMBADA, WikiText, COPA, multiple choice."""
