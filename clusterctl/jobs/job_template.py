"""The commented job that `clusterctl init --job` writes; the commands in its first comment build its data."""

from __future__ import annotations

JOB = """\
# A training for clusterctl. Make its data from a file of texts:
#   clusterctl data tokenizer train --input texts.jsonl --vocab-size 16000 --output data/tokenizer.json
#   clusterctl data build --input texts.jsonl --tokenizer data/tokenizer.json --append-eod \\
#       --output data/corpus_text_document
# Then: clusterctl plan {file}; clusterctl launch {file}; clusterctl report last -o report.html
name: {name}
# nodes: node[1-4]          # default: all nodes of the inventory
# devices: "[0,8)"          # default: all devices of each node
data: ./data                # pushed once; {{data}} below is its path on each node
collect: [checkpoints]      # copy the last checkpoint here; logs and metrics always come
# setup: {{modules: [cann/8.0], venv: ~/venv}}   # run once on each node; the ranks get its environment
# restart: {{max: 3}}         # start again after a failure, from the newest checkpoint
# notify: ./notify.sh       # a command, or https://..., that is called at the end, at failures and restarts
train:
  model: {{name: gpt-tiny, vocab: 16000}}     # see `clusterctl schema` for all sizes and keys
  data:
    prefix: "{{data}}/corpus_text_document"
    tokenizer: "{{data}}/tokenizer.json"
    split: "98,2,0"         # training, validation, test
  steps: 1000
  micro_batch: 4            # samples per device and pass
  global_batch: {batch}          # samples per step, over all devices
  precision: {precision}           # {precisions}
  optimizer: {{lr: 3e-4, min_lr: 3e-5, warmup_steps: 100}}
  eval: {{every: 100, batches: 8}}
  save: {{every: 200, keep: 2}}
"""


def job_text(name: str, file: str, kind: str = "cpu", devices: int = 1) -> str:
    """Return a commented job for `devices` devices of a kind."""
    precision, others = (
        ("fp32", "bf16 where the processor computes it fast") if kind == "cpu" else ("bf16", "or fp16")
    )
    return JOB.format(name=name, file=file, batch=4 * max(devices, 1), precision=precision, precisions=others)
