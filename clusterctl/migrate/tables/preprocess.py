"""Options of Megatron's preprocess_data.py, as options of `clusterctl data build`."""

OPTIONS = """
--input | words | --input
--json-keys --json-key | words | @keys
--split-sentences | flag | --unit=sentence
--keep-newlines | flag | - | texts are read as they are
--tokenizer-type | text | - | follows from the files of --tokenizer
--vocab-file --vocab | text | --tokenizer
--merge-file | text | - | found next to the vocabulary file
--tokenizer-model | text | --tokenizer
--append-eod | flag | --append-eod
--lang | text | - | sentences are found by rules for several languages
--output-prefix | text | @output
--dataset-impl | text | - | the memory-mapped format is written
--workers | int | --workers
--partitions | int | - | `data build --on NODES` divides the work
--log-interval | int | - | progress is shown on a terminal
"""
PROGRAMS = ("preprocess_data.py",)
