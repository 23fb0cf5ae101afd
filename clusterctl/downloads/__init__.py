"""Files from the internet: corpora and vocabularies, fetched with resume and verified."""
