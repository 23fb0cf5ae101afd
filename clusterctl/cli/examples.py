"""Examples at the end of each command's help. A test parses every one of them."""

from __future__ import annotations

from clusterctl.backends.backend import IN_SANDBOX, PLATFORMS, QUEUES

EXAMPLES = {
    "": """
        clusterctl demo
        clusterctl init --hosts node[1-4]
        clusterctl doctor
        clusterctl launch job.yaml
    """,
    "demo": """
        clusterctl demo
        clusterctl demo --steps 50 --dir /data/demo
        clusterctl demo --keep
    """,
    "selftest": """
        clusterctl selftest
        clusterctl selftest -n node[1-2] --dir /data/selftest
    """,
    "init": """
        clusterctl init --hosts node[1-4]
        clusterctl init --hosts 10.0.0.[1-8] --devices 8 --kind npu
        clusterctl init --hostfile hostfile -o cluster.yaml
        clusterctl init --job train
        clusterctl init --from 'pretrain_gpt.py --num-layers 24 --hidden-size 1024'
    """,
    "sandbox": """
        clusterctl sandbox up -n 4
        clusterctl sandbox status
        clusterctl sandbox down
    """,
    "sandbox up": f"""
        clusterctl sandbox up
        clusterctl sandbox up -n 4 --devices 8
        clusterctl sandbox up -n 4 --devices 8 --with-{IN_SANDBOX}
        clusterctl sandbox up --mode embedded --dir /tmp/sandbox
    """,
    "sandbox status": """
        clusterctl sandbox status
        clusterctl sandbox status --dir /tmp/sandbox --json
    """,
    "sandbox down": """
        clusterctl sandbox down
        clusterctl sandbox down --dir /tmp/sandbox
    """,
    "sandbox kill": """
        clusterctl sandbox kill node2
        clusterctl sandbox kill node2 --dry-run
    """,
    "sandbox cut": """
        clusterctl sandbox cut node2
        clusterctl sandbox cut node2 --dir /tmp/sandbox
    """,
    "sandbox heal": """
        clusterctl sandbox heal node2
        clusterctl sandbox heal node2 --dir /tmp/sandbox
    """,
    "doctor": """
        clusterctl doctor
        clusterctl doctor -n node[1-4] --fix-hints
        clusterctl doctor job.yaml
        clusterctl doctor --strict --json
    """,
    "nodes": """
        clusterctl nodes
        clusterctl nodes -c hostfile --wide
        clusterctl nodes expand node[1-4],gpu7
    """,
    "nodes list": """
        clusterctl nodes list
        clusterctl nodes list @first --wide
        clusterctl nodes list -c hostfile --json
    """,
    "nodes expand": """
        clusterctl nodes expand node[1-4]
        clusterctl nodes expand 'node[1-8]!node3' -S '\\n'
        clusterctl nodes expand @first -c cluster.yaml
    """,
    "nodes fold": """
        clusterctl nodes fold node1 node2 node3
        sinfo -h -o %n | clusterctl nodes fold -
    """,
    "nodes trust": """
        clusterctl nodes trust
        clusterctl nodes trust node[1-4] --yes
        clusterctl nodes trust --dry-run
    """,
    "nodes setup": """
        clusterctl nodes setup --wheelhouse wheelhouse
        clusterctl nodes setup --lock requirements.lock --wheelhouse wheels --env '~/venv' --base python3.11
        clusterctl nodes setup --bundle bundle.tar -n node[1-4] --dry-run
    """,
    "nodes wheelhouse": """
        clusterctl nodes wheelhouse requirements.txt -o wheelhouse
        clusterctl nodes wheelhouse --extra train --python-version 3.11 --platform manylinux_2_28_aarch64
    """,
    "fab": """
        clusterctl fab fabfile.py --list
        clusterctl fab fabfile.py update -n node[1-4] -- --branch main
        clusterctl fab fabfile.py disks -n @left --fold
    """,
    "bundle": """
        clusterctl bundle --wheelhouse wheelhouse --code . --tokenizer data/tokenizer.json -o bundle.tar
        clusterctl bundle --unpack bundle.tar -o site
    """,
    "data fetch": """
        clusterctl data fetch --list
        clusterctl data fetch gpt2-vocab gpt2-merges -o data
        clusterctl data fetch https://example.org/corpus.jsonl.zst --hash SHA256 -o data/corpus.jsonl.zst
    """,
    "data upload": """
        clusterctl data upload data s3://bucket/corpus
        clusterctl data upload data obs://bucket/corpus --endpoint https://obs.cn-north-4.myhuaweicloud.com
    """,
    "exec": """
        clusterctl exec all -- uname -r
        clusterctl exec node[1-4] -b -- cat /etc/os-release
        clusterctl exec all --shell -- 'df -h / && uptime'
        clusterctl exec all --job job.yaml -- npu-smi info
    """,
    "ssh": """
        clusterctl ssh node1
        clusterctl ssh node1 -- nvidia-smi -L
        clusterctl ssh node1 --dry-run
    """,
    "version": """
        clusterctl version
    """,
    "help": """
        clusterctl help
        clusterctl help launch
        clusterctl help ranktable merge
    """,
    "push": """
        clusterctl push ./code
        clusterctl push data.bin /data/data.bin -n node[1-4]
        clusterctl push ./code --dry-run
    """,
    "pull": """
        clusterctl pull /var/log/app.log ./logs
        clusterctl pull '~/results' ./results -n node[1-4] --fold
        clusterctl pull last ./written
    """,
    "keeper": """
        clusterctl exec all --persist 10m -- true
        clusterctl keeper status
        clusterctl keeper stop
    """,
    "keeper status": """
        clusterctl keeper status
        clusterctl keeper status --json
    """,
    "keeper stop": """
        clusterctl keeper stop
    """,
    "ranktable": """
        clusterctl ranktable build
        clusterctl ranktable check hccl_4s_32p.json
        clusterctl ranktable push hccl_4s_32p.json
    """,
    "ranktable build": """
        clusterctl ranktable build
        clusterctl ranktable build -n node[1-4] --devices '[0,8)' -o rank_table.json
        clusterctl ranktable build --from plan.yaml --dry-run
    """,
    "ranktable merge": """
        clusterctl ranktable merge node1.json node2.json
        clusterctl ranktable merge node*.json --sort address -o rank_table.json
    """,
    "ranktable convert": """
        clusterctl ranktable convert old.json -o rank_table.json
        clusterctl ranktable convert rank_table.json --to 1.2 --facts a3.json
        clusterctl ranktable convert rank_table.json --to deepspeed -o hostfile
    """,
    "ranktable check": """
        clusterctl ranktable check rank_table.json
        clusterctl ranktable check rank_table.json --for a2
        clusterctl ranktable check node*.json --same --json
    """,
    "ranktable show": """
        clusterctl ranktable show rank_table.json
        clusterctl ranktable show rank_table.json --json
    """,
    "ranktable diff": """
        clusterctl ranktable diff old.json new.json
        clusterctl ranktable diff old.json new.json --by node
    """,
    "ranktable slice": """
        clusterctl ranktable slice rank_table.json --ranks '[0,16)' -o half.json
        clusterctl ranktable slice rank_table.json -n node[1-2]
        clusterctl ranktable slice rank_table.json --drop node3
    """,
    "ranktable push": """
        clusterctl ranktable push rank_table.json
        clusterctl ranktable push rank_table.json --to /etc/hccl/rank_table.json --dry-run
    """,
    "ranktable verify": """
        clusterctl ranktable verify rank_table.json
        clusterctl ranktable verify rank_table.json --at /etc/hccl/rank_table.json
    """,
    "hostfile": """
        clusterctl hostfile build -o hostfile
        clusterctl hostfile check hostfile
        clusterctl hostfile convert hostfile --to openmpi
    """,
    "hostfile build": """
        clusterctl hostfile build -o hostfile
        clusterctl hostfile build -n node[1-4] --to openmpi
        clusterctl hostfile build --to torchrun --master-port 29500
    """,
    "hostfile check": """
        clusterctl hostfile check hostfile
        clusterctl hostfile check hostfile --for openmpi
        clusterctl hostfile check hostfile --include node1:0,2
    """,
    "hostfile convert": """
        clusterctl hostfile convert hostfile --to openmpi
        clusterctl hostfile convert nodelist.txt --to deepspeed --slots 8 -o hostfile
        clusterctl hostfile convert hostfile --to cluster --kind cuda -o cluster.yaml
    """,
    "plan": """
        clusterctl plan job.yaml
        clusterctl plan job.yaml --set train.steps=100 -n node[1-4]
        clusterctl plan job.yaml --what-if nodes=16,devices=8,kind=npu
    """,
    "schema": """
        clusterctl schema > job.schema.json
    """,
    "launch": """
        clusterctl launch job.yaml
        clusterctl launch job.yaml --set train.steps=100 --detach
        clusterctl launch job.yaml --sweep train.optimizer.lr=1e-4,3e-4
        clusterctl launch -n node[1-2] -- python train.py --lr 1e-4
    """,
    "submit": "\n".join(f"clusterctl submit {name} job.yaml" for name in QUEUES),
    **{
        f"submit {name}": f"""
        clusterctl submit {name} job.yaml
        clusterctl submit {name} job.yaml --print
        clusterctl submit {name} job.yaml --set {known.example.replace(" ", " --set ")}
    """
        for name, known in QUEUES.items()
    },
    **{
        f"submit {name}": "\n".join(f"clusterctl submit {name} job.yaml {words}" for words in verb.examples)
        for name, verb in PLATFORMS.items()
    },
    "attach": """
        clusterctl attach
        clusterctl attach last --quiet
        clusterctl attach last --take-over
    """,
    "resume": """
        clusterctl resume last
        clusterctl resume last --dry-run
        clusterctl resume last --set train.steps=1000
        clusterctl resume last --detach
        clusterctl resume last --nodes node[3-4]
    """,
    "runs": """
        clusterctl runs
        clusterctl runs --json
        clusterctl runs prune --keep 10 --dry-run
    """,
    "runs prune": """
        clusterctl runs prune --keep 10 --dry-run
        clusterctl runs prune --older-than 30d --yes
        clusterctl runs prune --older-than 8w --here
    """,
    "status": """
        clusterctl status
        clusterctl status last --watch
        clusterctl status last --ranks --json
    """,
    "top": """
        clusterctl top
        clusterctl top demo-1122
        clusterctl top --once
    """,
    "stop": """
        clusterctl stop last
        clusterctl stop last --grace 60
        clusterctl stop last --dry-run
    """,
    "logs": """
        clusterctl logs tail -f
        clusterctl logs show last --rank 0-3
        clusterctl logs pull last
    """,
    "logs tail": """
        clusterctl logs tail -f
        clusterctl logs tail last --rank 3 -n 100
        clusterctl logs tail last --errors
    """,
    "logs show": """
        clusterctl logs show
        clusterctl logs show last --rank 0-3 --since 10m
        clusterctl logs show last --fold --fuzzy --grep loss
    """,
    "logs pull": """
        clusterctl logs pull
        clusterctl logs pull last ./logs
        clusterctl logs pull last --dry-run
    """,
    "report": """
        clusterctl report last -o report.html
        clusterctl report demo-1122 --against demo-1121 -o diff.html
        clusterctl report last --csv steps.csv
    """,
    "compare": """
        clusterctl compare demo-1121 demo-1122
        clusterctl compare last demo-1121 --html compare.html
        clusterctl compare last demo-1121 --tolerance 1e-6 --json
    """,
    "data": """
        clusterctl data build --input corpus.jsonl --tokenizer tokenizer.json --output data/corpus --append-eod
        clusterctl data info data/corpus
        clusterctl data verify data/corpus
    """,
    "data tokenizer": """
        clusterctl data tokenizer train --input corpus.jsonl --vocab-size 32000 --output tokenizer.json
    """,
    "data tokenizer train": """
        clusterctl data tokenizer train --input corpus.jsonl --vocab-size 32000 --output tokenizer.json
        clusterctl data tokenizer train --input wiki.txt --each paragraph --vocab-size 8000 --output tokenizer
    """,
    "data tokenizer glm": """
        clusterctl data tokenizer glm --tokenizer tokenizer.json --output glm-tokenizer.json
    """,
    "data build": """
        clusterctl data build --input corpus.jsonl --tokenizer tokenizer.json --output data/corpus --append-eod
        clusterctl data build --input wiki.xml.bz2 --tokenizer tokenizer.json --output data/wiki --dedup --workers 8
        clusterctl data build --on node[1-4] --input corpus.jsonl --tokenizer tokenizer.json --output data/corpus
    """,
    "data info": """
        clusterctl data info data/corpus
        clusterctl data info data/corpus --tokens 300e9 --samples 5
    """,
    "data verify": """
        clusterctl data verify data/corpus
        clusterctl data verify data/corpus --tokenizer tokenizer.json
    """,
    "data repair": """
        clusterctl data repair data/corpus --dry-run
        clusterctl data repair data/corpus --output data/repaired
    """,
    "data split": """
        clusterctl data split data/corpus --parts 8 --output data/shard
        clusterctl data split data/corpus --split 949,50,1 --output data/part
    """,
    "data merge": """
        clusterctl data merge data/a data/b --output data/all
        clusterctl data merge data/a data/b --dedup --output data/all
    """,
    "data scatter": """
        clusterctl data scatter shards/*.bin --to /data/shards
        clusterctl data scatter shards/a shards/b --to /data/shards -n node[1-2] --dry-run
    """,
    "checkpoint": """
        clusterctl checkpoint list last
        clusterctl checkpoint verify last
    """,
    "checkpoint list": """
        clusterctl checkpoint list
        clusterctl checkpoint list demo-1120-142501-3fa9 --json
        clusterctl checkpoint list runs/demo-1/checkpoints
    """,
    "checkpoint info": """
        clusterctl checkpoint info last
        clusterctl checkpoint info last --step 100
        clusterctl checkpoint info runs/demo-1/checkpoints/step-00000100 --json
    """,
    "checkpoint verify": """
        clusterctl checkpoint verify
        clusterctl checkpoint verify last --all
        clusterctl checkpoint verify runs/demo-1/checkpoints/step-00000100
    """,
    "checkpoint diff": """
        clusterctl checkpoint diff last:100 last:200
        clusterctl checkpoint diff last runs/demo-1/checkpoints/step-00000100 --json
    """,
    "checkpoint pull": """
        clusterctl checkpoint pull last
        clusterctl checkpoint pull last --step 100 -o /data/best
        clusterctl checkpoint pull last --dry-run
    """,
    "checkpoint prune": """
        clusterctl checkpoint prune last --keep-last 2 --dry-run
        clusterctl checkpoint prune last --keep-last 1 --keep-every 1000 --keep-best 1 --yes
        clusterctl checkpoint prune /shared/checkpoints/demo-1 --keep-last 3
    """,
    "checkpoint import": """
        clusterctl checkpoint import downloads/gpt2 -o weights/gpt2
        clusterctl checkpoint import downloads/gpt2 -o weights/gpt2 --dry-run
    """,
    "checkpoint export": """
        clusterctl checkpoint export last --to hf -o exports/gpt2
        clusterctl checkpoint export runs/demo-1/checkpoints/step-100 --to hf --dtype bf16 -o exports/gpt2
    """,
    "generate": """
        clusterctl generate last --prompt 'A class definition'
        clusterctl generate last -p 'A class' --max-tokens 200 --temperature 0
        clusterctl generate last --prompts prompts.txt --weights int8 > texts.jsonl
        clusterctl generate runs/demo-1/checkpoints/step-100 -p 'A class' --json
    """,
    "serve": """
        clusterctl serve last
        clusterctl serve last --port 0 --weights bf16 --cache 4GiB
        clusterctl serve checkpoints/step-00001000 --host 0.0.0.0 --api-key-file key.txt
    """,
    "eval": """
        clusterctl eval last --task ppl --split test
        clusterctl eval last --task lambada=lambada_test.jsonl --json
        clusterctl eval checkpoints/step-00001000 --task wikitext=wiki.test.tokens --stride 32
    """,
    "tensorboard": """
        clusterctl tensorboard last
        clusterctl tensorboard last -o ./tensorboard
    """,
}


def examples(key: str) -> list[str]:
    """Return the example lines of a command."""
    return [line.strip() for line in EXAMPLES.get(key, "").strip().splitlines()]
