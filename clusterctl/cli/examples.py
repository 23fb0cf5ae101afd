"""Examples at the end of each command's help. A test parses every one of them."""

from __future__ import annotations

from collections.abc import Collection

from clusterctl.backends.backend import IN_SANDBOX, PLATFORMS, QUEUES

# The commands whose first examples the help of a noun shows; "" is the program itself.
OF_NOUNS = {
    "": ("demo", "init", "doctor", "launch"),
    "sandbox": ("sandbox up", "sandbox status", "sandbox down"),
    "keeper": ("keeper status", "keeper stop"),
    "ranktable": ("ranktable build", "ranktable check", "ranktable push"),
    "hostfile": ("hostfile build", "hostfile check", "hostfile convert"),
    "submit": tuple(f"submit {name}" for name in QUEUES),
    "logs": ("logs tail", "logs show", "logs pull"),
    "data": ("data build", "data info", "data verify"),
    "data tokenizer": ("data tokenizer train", "data tokenizer glm"),
    "checkpoint": ("checkpoint list", "checkpoint verify"),
}
# Each line is an example of the command with which it begins.
OF_COMMANDS = f"""\
clusterctl demo
clusterctl demo --steps 50 --dir /data/demo
clusterctl demo --keep
clusterctl selftest
clusterctl selftest -n node[1-2] --dir /data/selftest
clusterctl init --hosts node[1-4]
clusterctl init --hosts 10.0.0.[1-8] --devices 8 --kind npu
clusterctl init --hostfile hostfile -o cluster.yaml
clusterctl init --job train
clusterctl init --from 'pretrain_gpt.py --num-layers 24 --hidden-size 1024'
clusterctl sandbox up
clusterctl sandbox up -n 4 --devices 8
clusterctl sandbox up -n 4 --devices 8 --with-{IN_SANDBOX}
clusterctl sandbox up --mode embedded --dir /tmp/sandbox
clusterctl sandbox status
clusterctl sandbox status --dir /tmp/sandbox --json
clusterctl sandbox down
clusterctl sandbox down --dir /tmp/sandbox
clusterctl sandbox kill node2
clusterctl sandbox kill node2 --dry-run
clusterctl sandbox cut node2
clusterctl sandbox cut node2 --dir /tmp/sandbox
clusterctl sandbox heal node2
clusterctl sandbox heal node2 --dir /tmp/sandbox
clusterctl doctor
clusterctl doctor -n node[1-4] --fix-hints
clusterctl doctor job.yaml
clusterctl doctor --strict --json
clusterctl nodes
clusterctl nodes -c hostfile --wide
clusterctl nodes list
clusterctl nodes list @first --wide
clusterctl nodes list -c hostfile --json
clusterctl nodes expand node[1-4]
clusterctl nodes expand 'node[1-8]!node3' -S '\\n'
clusterctl nodes expand @first -c cluster.yaml
clusterctl nodes fold node1 node2 node3
sinfo -h -o %n | clusterctl nodes fold -
clusterctl nodes trust
clusterctl nodes trust node[1-4] --yes
clusterctl nodes trust --dry-run
clusterctl nodes setup --wheelhouse wheelhouse
clusterctl nodes setup --lock requirements.lock --wheelhouse wheels --env '~/venv' --base python3.11
clusterctl nodes setup --bundle bundle.tar -n node[1-4] --dry-run
clusterctl nodes wheelhouse requirements.txt -o wheelhouse
clusterctl nodes wheelhouse --extra train --python-version 3.11 --platform manylinux_2_28_aarch64
clusterctl exec all -- uname -r
clusterctl exec node[1-4] -b -- cat /etc/os-release
clusterctl exec all --shell -- 'df -h / && uptime'
clusterctl exec all --job job.yaml -- npu-smi info
clusterctl fab fabfile.py --list
clusterctl fab fabfile.py update -n node[1-4] -- --branch main
clusterctl fab fabfile.py disks -n @left --fold
clusterctl ssh node1
clusterctl ssh node1 -- nvidia-smi -L
clusterctl ssh node1 --dry-run
clusterctl version
clusterctl help
clusterctl help launch
clusterctl help ranktable merge
clusterctl push ./code
clusterctl push data.bin /data/data.bin -n node[1-4]
clusterctl push ./code --dry-run
clusterctl pull /var/log/app.log ./logs
clusterctl pull '~/results' ./results -n node[1-4] --fold
clusterctl pull last ./written
clusterctl bundle --wheelhouse wheelhouse --code . --tokenizer data/tokenizer.json -o bundle.tar
clusterctl bundle --unpack bundle.tar -o site
clusterctl keeper status
clusterctl keeper status --json
clusterctl keeper stop
clusterctl ranktable build
clusterctl ranktable build -n node[1-4] --devices '[0,8)' -o rank_table.json
clusterctl ranktable build --from plan.yaml --dry-run
clusterctl ranktable merge node1.json node2.json
clusterctl ranktable merge node*.json --sort address -o rank_table.json
clusterctl ranktable convert old.json -o rank_table.json
clusterctl ranktable convert rank_table.json --to 1.2 --facts a3.json
clusterctl ranktable convert rank_table.json --to deepspeed -o hostfile
clusterctl ranktable check rank_table.json
clusterctl ranktable check rank_table.json --for a2
clusterctl ranktable check node*.json --same --json
clusterctl ranktable show rank_table.json
clusterctl ranktable show rank_table.json --json
clusterctl ranktable diff old.json new.json
clusterctl ranktable diff old.json new.json --by node
clusterctl ranktable slice rank_table.json --ranks '[0,16)' -o half.json
clusterctl ranktable slice rank_table.json -n node[1-2]
clusterctl ranktable slice rank_table.json --drop node3
clusterctl ranktable push rank_table.json
clusterctl ranktable push rank_table.json --to /etc/hccl/rank_table.json --dry-run
clusterctl ranktable verify rank_table.json
clusterctl ranktable verify rank_table.json --at /etc/hccl/rank_table.json
clusterctl hostfile build -o hostfile
clusterctl hostfile build -n node[1-4] --to openmpi
clusterctl hostfile build --to torchrun --master-port 29500
clusterctl hostfile check hostfile
clusterctl hostfile check hostfile --for openmpi
clusterctl hostfile check hostfile --include node1:0,2
clusterctl hostfile convert hostfile --to openmpi
clusterctl hostfile convert nodelist.txt --to deepspeed --slots 8 -o hostfile
clusterctl hostfile convert hostfile --to cluster --kind cuda -o cluster.yaml
clusterctl plan job.yaml
clusterctl plan job.yaml --set train.steps=100 -n node[1-4]
clusterctl plan job.yaml --what-if nodes=16,devices=8,kind=npu
clusterctl schema > job.schema.json
clusterctl launch job.yaml
clusterctl launch job.yaml --set train.steps=100 --detach
clusterctl launch job.yaml --sweep train.optimizer.lr=1e-4,3e-4
clusterctl launch -n node[1-2] -- python train.py --lr 1e-4
clusterctl attach
clusterctl attach last --quiet
clusterctl attach last --take-over
clusterctl resume last
clusterctl resume last --dry-run
clusterctl resume last --set train.steps=1000
clusterctl resume last --detach
clusterctl resume last --nodes node[3-4]
clusterctl runs
clusterctl runs --json
clusterctl runs prune --keep 10 --dry-run
clusterctl runs prune --older-than 30d --yes
clusterctl runs prune --older-than 8w --here
clusterctl status
clusterctl status last --watch
clusterctl status last --ranks --json
clusterctl top
clusterctl top demo-1122
clusterctl top --once
clusterctl stop last
clusterctl stop last --grace 60
clusterctl stop last --dry-run
clusterctl logs tail -f
clusterctl logs tail last --rank 3 -n 100
clusterctl logs tail last --errors
clusterctl logs show
clusterctl logs show last --rank 0-3 --since 10m
clusterctl logs show last --fold --fuzzy --grep loss
clusterctl logs pull
clusterctl logs pull last ./logs
clusterctl logs pull last --dry-run
clusterctl report last -o report.html
clusterctl report demo-1122 --against demo-1121 -o diff.html
clusterctl report last --csv steps.csv
clusterctl compare demo-1121 demo-1122
clusterctl compare last demo-1121 --html compare.html
clusterctl compare last demo-1121 --tolerance 1e-6 --json
clusterctl data tokenizer train --input corpus.jsonl --vocab-size 32000 --output tokenizer.json
clusterctl data tokenizer train --input wiki.txt --each paragraph --vocab-size 8000 --output tokenizer
clusterctl data tokenizer glm --tokenizer tokenizer.json --output glm-tokenizer.json
clusterctl data fetch --list
clusterctl data fetch gpt2-vocab gpt2-merges -o data
clusterctl data fetch https://example.org/corpus.jsonl.zst --hash SHA256 -o data/corpus.jsonl.zst
clusterctl data upload data s3://bucket/corpus
clusterctl data upload data obs://bucket/corpus --endpoint https://obs.cn-north-4.myhuaweicloud.com
clusterctl data build --input corpus.jsonl --tokenizer tokenizer.json --output data/corpus --append-eod
clusterctl data build --input wiki.xml.bz2 --tokenizer tokenizer.json --output data/wiki --dedup --workers 8
clusterctl data build --on node[1-4] --input corpus.jsonl --tokenizer tokenizer.json --output data/corpus
clusterctl data info data/corpus
clusterctl data info data/corpus --tokens 300e9 --samples 5
clusterctl data verify data/corpus
clusterctl data verify data/corpus --tokenizer tokenizer.json
clusterctl data repair data/corpus --dry-run
clusterctl data repair data/corpus --output data/repaired
clusterctl data split data/corpus --parts 8 --output data/shard
clusterctl data split data/corpus --split 949,50,1 --output data/part
clusterctl data merge data/a data/b --output data/all
clusterctl data merge data/a data/b --dedup --output data/all
clusterctl data scatter shards/*.bin --to /data/shards
clusterctl data scatter shards/a shards/b --to /data/shards -n node[1-2] --dry-run
clusterctl checkpoint list
clusterctl checkpoint list demo-1120-142501-3fa9 --json
clusterctl checkpoint list runs/demo-1/checkpoints
clusterctl checkpoint info last
clusterctl checkpoint info last --step 100
clusterctl checkpoint info runs/demo-1/checkpoints/step-00000100 --json
clusterctl checkpoint verify
clusterctl checkpoint verify last --all
clusterctl checkpoint verify runs/demo-1/checkpoints/step-00000100
clusterctl checkpoint diff last:100 last:200
clusterctl checkpoint diff last runs/demo-1/checkpoints/step-00000100 --json
clusterctl checkpoint pull last
clusterctl checkpoint pull last --step 100 -o /data/best
clusterctl checkpoint pull last --dry-run
clusterctl checkpoint prune last --keep-last 2 --dry-run
clusterctl checkpoint prune last --keep-last 1 --keep-every 1000 --keep-best 1 --yes
clusterctl checkpoint prune /shared/checkpoints/demo-1 --keep-last 3
clusterctl checkpoint import downloads/gpt2 -o weights/gpt2
clusterctl checkpoint import downloads/gpt2 -o weights/gpt2 --dry-run
clusterctl checkpoint export last --to hf -o exports/gpt2
clusterctl checkpoint export runs/demo-1/checkpoints/step-100 --to hf --dtype bf16 -o exports/gpt2
clusterctl generate last --prompt 'A class definition'
clusterctl generate last -p 'A class' --max-tokens 200 --temperature 0
clusterctl generate last --prompts prompts.txt --weights int8 > texts.jsonl
clusterctl generate runs/demo-1/checkpoints/step-100 -p 'A class' --json
clusterctl serve last
clusterctl serve last --port 0 --weights bf16 --cache 4GiB
clusterctl serve checkpoints/step-00001000 --host 0.0.0.0 --api-key-file key.txt
clusterctl eval last --task ppl --split test
clusterctl eval last --task lambada=lambada_test.jsonl --json
clusterctl eval checkpoints/step-00001000 --task wikitext=wiki.test.tokens --stride 32
clusterctl tensorboard last
clusterctl tensorboard last -o ./tensorboard
"""
OF_SUBMISSIONS = [
    *(
        f"clusterctl submit {name} job.yaml{words}"
        for name, known in QUEUES.items()
        for words in ("", " --print", f" --set {known.example.replace(' ', ' --set ')}")
    ),
    *(
        f"clusterctl submit {name} job.yaml {words}"
        for name, verb in PLATFORMS.items()
        for words in verb.examples
    ),
]
LINES = [*OF_COMMANDS.splitlines(), *OF_SUBMISSIONS]


def examples(key: str, commands: Collection[str] = ()) -> list[str]:
    """Return the example lines of a command, without those of `commands` whose names begin with its own."""
    if key in OF_NOUNS:
        return [examples(name)[0] for name in OF_NOUNS[key]]
    deeper = [name for name in commands if name.startswith(f"{key} ")]
    return [line for line in LINES if _is_of(line, key) and not any(_is_of(line, name) for name in deeper)]


def _is_of(line: str, key: str) -> bool:
    return f"{line.partition('clusterctl ')[2]} ".startswith(f"{key} ")
