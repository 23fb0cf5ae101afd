"""The pair of files by the name that it had first; `trainer.indexed` is where it lives."""

from trainer.indexed import Corpus as Corpus
from trainer.indexed import Writer as Writer
from trainer.indexed import open_corpus as open_corpus
from trainer.indexed import token_type as token_type
