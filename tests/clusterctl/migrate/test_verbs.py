"""Scripts with the shapes of published ones become what they do: a job, or a command of another verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import UsageError
from clusterctl.migrate import read
from clusterctl.migrate.commands import command_text
from clusterctl.migrate.translate import translate
from clusterctl.migrate.write import job_text
from trainer.plan.resolve import plan_config

SIZES = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16"


def written(text: str) -> list[str]:
    """Return the commands that another program's command becomes, without the comments."""
    found = read.read(text)
    assert found.verb != "job"
    return [line for line in command_text(found).splitlines() if not line.startswith("#")]


def job(text: str) -> Any:
    found = read.read(text)
    assert found.verb == "job"
    return parse_document(job_text(translate(found)), "job.yaml").value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_text_generation_server_becomes_serve(folder: Path) -> None:
    (folder / "server.sh").write_text(
        f'ARGS="--nproc_per_node 1 \\\n --master_port 6000"\nLOAD=out/model\n'
        f"torchrun $ARGS tools/run_text_generation_server.py {SIZES} --load ${{LOAD}} --fp16 \\\n"
        " --vocab-file tok/vocab.json --tensor-model-parallel-size 2 --out-seq-length 64 --top_p 0.9 --seed 42 \\\n"
        " --micro-batch-size 1\n"
    )
    assert written("server.sh") == [
        "clusterctl checkpoint import out/model -o weights/server",
        "clusterctl serve weights/server --weights fp16 --tokenizer tok/vocab.json --tensor 2 --port 5000",
    ]
    text = command_text(read.read("server.sh"))
    assert "# --num-layers, --hidden-size, --num-attention-heads, --seq-length: the checkpoint" in text
    assert "# --out-seq-length, --top_p, --seed: each request gives it" in text


def glm(folder: Path) -> None:
    (folder / "model.sh").write_text(
        f'MODEL_ARGS="--block-lm {SIZES} --load-pretrained ${{CHECKPOINT_PATH}}/glm"\n'
    )
    (folder / "lambda.sh").write_text(
        'TASK_NAME=lambda\nDATA_PATH="${DATA_ROOT}/test.jsonl"\nEVALUATE_ARGS="--eval-batch-size 4"\n'
    )
    (folder / "copa.sh").write_text('TASK_NAME=COPA\nDATA_PATH="${DATA_ROOT}/COPA"\nEPOCHS=7\n')
    start = "CHECKPOINT_PATH=/c\nDATA_ROOT=/d\nsource $1\nsource $2\nPORT=$(shuf -n 1 -i 1-9)\n"
    (folder / "generate.sh").write_text(
        f"{start}python -m torch.distributed.launch --master_port $PORT generate_samples.py $MODEL_ARGS --fp16 \\\n"
        " --out-seq-length 32 --temperature 0.9 --top-k 40 --top-p 0\n"
    )
    (folder / "evaluate.sh").write_text(
        f"{start}deepspeed finetune_glm.py --deepspeed --finetune --task ${{TASK_NAME}} --valid-data $DATA_PATH \\\n"
        " $MODEL_ARGS $EVALUATE_ARGS --fp16 2>&1 | tee log-$(date).txt\n"
    )
    (folder / "tune.sh").write_text(
        f'{start}run_cmd="NCCL_DEBUG=info deepspeed --num_gpus 8 finetune_glm.py --task ${{TASK_NAME}}'
        ' --data-dir ${DATA_PATH} $MODEL_ARGS --deepspeed --deepspeed_config ds.json --epochs ${EPOCHS} --fp16"\n'
        "echo ${run_cmd}\neval ${run_cmd}\n"
    )
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
    }
    optimizer = {"type": "Adam", "params": {"lr": 5e-6, "betas": [0.9, 0.95]}}
    zero = {"stage": 2, "cpu_offload": True}
    (folder / "ds.json").write_text(
        json.dumps({**settings, "optimizer": optimizer, "zero_optimization": zero})
    )


def test_scripts_of_glm_generate_evaluate_and_tune(folder: Path) -> None:
    glm(folder)
    assert written("bash generate.sh model.sh") == [
        "clusterctl checkpoint import /c/glm -o weights/generate",
        "clusterctl generate weights/generate --weights fp16 --max-tokens 32 --temperature 0.9 --top-k 40",
    ]
    assert written("bash evaluate.sh model.sh lambda.sh") == [
        "clusterctl checkpoint import /c/glm -o weights/evaluate",
        "clusterctl eval weights/evaluate --task lambada=/d/test.jsonl --weights fp16",
    ]
    tuned = job("bash tune.sh model.sh copa.sh")
    train = tuned["train"]
    assert train["tune"] == {
        "task": "copa",
        "epochs": 7,
        "train": "{data}/train.jsonl",
        "valid": "{data}/val.jsonl",
    }
    assert (tuned["data_there"], train["init"], train["offload"]) == ("/d/COPA", "/c/glm", True)
    # GLM reads these from DeepSpeed's file.
    assert (train["micro_batch"], train["global_batch"], train["zero"]) == (4, 64, 2)
    assert (
        train["optimizer"]["lr"] == 5e-6
        and train["optimizer"]["clip"] == 0.5
        and train["engine"] == "deepspeed"
    )


def test_an_evaluation_of_zero_epochs_and_a_task_without_counterpart(folder: Path) -> None:
    assert written(f"finetune_glm.py {SIZES} --task multichoice --test-data q.jsonl --epochs 0") == [
        "clusterctl eval last --task choice=q.jsonl"
    ]
    (folder / "l.sh").write_text(
        'cmd=""\ncmd+="python3 tasks/main.py "\ncmd+="--task LAMBADA --strict-lambada "\n'
        f'cmd+="--valid-data /d/l.json --load /m {SIZES} "\nset -x\n$cmd\n'
    )
    assert (
        written("l.sh")[-1]
        == "clusterctl eval weights/l --task lambada=/d/l.json --convention megatron-strict"
    )
    with pytest.raises(UsageError, match="the task RACE has no counterpart"):
        written("tasks/main.py --task RACE --valid-data x")
    with pytest.raises(UsageError, match=r"pretrain_bert\.py: BERT reads in both directions"):
        read.read("torchrun pretrain_bert.py --num-layers 2")


DISTRIBUTE = """if [ $# != 4 ] && [ $# != 5 ]; then echo "usage"; exit 1; fi
real(){ if [ "${1:0:1}" == "/" ]; then echo "$1"; else echo "$(realpath -m $PWD/$1)"; fi; }
CONFIG=$(real $2)
RANGE=${3:1:${#3}-2}
if [ ! -f $CONFIG ]; then echo "no file"; exit 1; fi
for((i=${RANGE%%","*}; i<${RANGE##*","}; i++)); do
  export RANK_ID=$((i))
  python run_mindformer.py --config=$CONFIG --use_parallel=True --run_mode=$4 &> log$i &
done
"""
CONFIG = """run_mode: train
parallel: {parallel_mode: 0}
runner_config: {epochs: 3, batch_size: 4}
parallel_config: {data_parallel: 1, model_parallel: 1, pipeline_stage: 1, vocab_emb_dp: true}
recompute_config: {recompute: true, mp_comm_recompute: false}
model:
  model_config: {seq_length: 16, hidden_size: 8, num_layers: 2, num_heads: 2, vocab_size: 50257, top_k: 5, top_p: 1,
    max_decode_length: 32, do_sample: false, checkpoint_name_or_path: /w/gpt2}
"""


@pytest.mark.parametrize("script", [True, False])
def test_run_distribute_trains_or_generates(folder: Path, script: bool) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "run.yaml").write_text(CONFIG)
    if script:
        (folder / "run_distribute.sh").write_text(DISTRIBUTE)
    trained = job("bash run_distribute.sh t.json configs/run.yaml [0,8] train")
    assert trained["devices"] == "[0,8)" and trained["train"]["global_batch"] == 32
    assert "it ran on 4 nodes" in job_text(
        translate(read.read("bash run_distribute.sh t.json configs/run.yaml [8,16] train 32"))
    )
    assert written("bash run_distribute.sh t.json configs/run.yaml [0,8] predict 8") == [
        "clusterctl checkpoint import /w/gpt2 -o weights/run",
        "clusterctl generate weights/run --tensor 1 --pipeline 1 --top-k 5 --top-p 1 --max-tokens 32 --temperature 0",
    ]


ZOO = """model_size="345M"
data_path=""
for para in $*
do
    if [[ $para == --model_size* ]];then
        model_size=`echo ${para#*=}`
    fi
    if [[ $para == --data_path* ]];then
        data_path=`echo ${para#*=}`
    fi
done
if [[ $data_path == "" ]];then
    echo "[Error] \\"data_path\\" is missing"
    exit 1
fi
SIZES=("345M" "1.3B")
if [[ ! " ${SIZES[@]} " =~ " ${model_size} " ]]; then
  exit 1
fi
DIR=`pwd`
case $model_size in
  "345M") TP=1; HIDDEN=1024; LR=1.5e-4;;
  "1.3B")
    TP=2
    HIDDEN=2048
    LR=2e-4
    ;;
esac
options=" \\
    --tensor-model-parallel-size $TP \\
    --hidden-size $HIDDEN --num-layers 24 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 \\
    --global-batch-size 32 --train-iters 500 --lr $LR --data-path $data_path/corpus --fp16 \\
"
if [ ${USE_DEEPSPEED:-1} -eq 1 ]; then
    options="${options} --deepspeed --deepspeed_config=./ds.json --zero-stage=0"
fi
cat <<EOT > ./ds.json
{ "zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "initial_scale_power": $((10 + 2))} }
EOT
python3 run.py --include localhost:0,1,2,3 ${DIR}/pretrain_gpt.py ${options} &> ./train.log &
wait
"""


def test_a_script_that_chooses_by_its_arguments_gives_their_values(folder: Path) -> None:
    (folder / "train.sh").write_text(ZOO)
    made = job("bash ./train.sh --data_path=./d/ --model_size=1.3B")
    train = made["train"]
    assert (train["model"]["hidden"], train["parallel"]["tensor"], train["optimizer"]["lr"]) == (
        2048,
        2,
        2e-4,
    )
    # The script writes DeepSpeed's file, and its stage counts.
    assert (train["zero"], train["loss_scale"]["initial"], train["engine"]) == (1, 4096.0, "deepspeed")
    assert (made["data"], train["data"]["prefix"], made["name"]) == ("./d", "{data}/corpus", "train")
    text = job_text(translate(read.read("train.sh")))
    assert "hidden: 1024" in text and "the script would end at train.sh:14" in text
    text = job_text(translate(read.read("bash ./train.sh --data_path=d --model_size=9B")))
    assert (
        "the script would end" in text and "--tensor-model-parallel-size: its value $TP is known only" in text
    )


def test_a_value_that_only_the_machine_knows_is_left_out(folder: Path) -> None:
    lines = command_text(
        read.read("preprocess_data.py --input a.json --vocab v.json --workers $(nproc) --output-prefix o")
    )
    assert "# --workers: its value $(nproc) is known only when the script runs" in lines
    assert lines.endswith(
        "clusterctl data build --input a.json --tokenizer v.json --output o_text_document\n"
    )


def test_a_container_starts_what_its_command_says(folder: Path) -> None:
    (folder / "tools").mkdir()
    (folder / "pretrain.sh").write_text(
        f'cmd="python3 -m oneflow_gpt.training"\ncmd+=" {SIZES} --micro-batch-size ${{MICRO:-8}} --dataset /d/x"\n'
        'if [[ -z "${CONTAINER}" ]]; then\n  ${cmd}\nelse\n'
        '  python3 tools/launch_container.py --src . --py 3.7 --cmd "$cmd"\nfi\n'
    )
    (folder / "start.sh").write_text(
        "export MICRO=4\nexport CONTAINER=ON\nsource $(dirname $0)/pretrain.sh\n"
    )
    made = job("bash start.sh")
    assert (made["train"]["micro_batch"], made["data_there"]) == (4, "/d")
    assert job("bash pretrain.sh")["train"]["micro_batch"] == 8


MANIFEST = """kind: DeepSpeedJob
metadata: {name: small}
spec:
  config:
    slotsPerWorker: 4
    run:
      python:
        - M/pretrain_gpt.py
        - "--num-layers=2"
        - "--hidden-size=8"
        - "--num-attention-heads=2"
        - "--seq-length=16"
        - "--micro-batch-size=2"
        - "--global-batch-size=16"
        - "--train-iters=5"
        - "--zero-stage=0"
        - "--deepspeed"
        - "--deepspeed_config=x/y/ds.json"
        - "--data-path=examples/wiki_text_document"
  worker:
    replicas: 2
    template:
      spec:
        containers:
          - name: worker
            image: some/image:1
            workingDir: /t9k/mnt/
            resources:
              requests: {cpu: 2, memory: 8Gi, nvidia.com/gpu: 4}
              limits: {cpu: 4, memory: 16Gi, nvidia.com/gpu: 4}
            volumeMounts:
              - {mountPath: /t9k/mnt, name: data}
        volumes:
          - name: data
            persistentVolumeClaim: {claimName: megatron}
"""


def test_a_manifest_gives_the_part_for_kubernetes_and_the_engines_own_stage(folder: Path) -> None:
    (folder / "small.yaml").write_text(MANIFEST)
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    made = job("small.yaml")
    assert made["kubernetes"] == {
        **{"nodes": 2, "devices": 4, "kind": "cuda", "cpus": "4", "memory": "16Gi"},
        "claims": {"megatron": "/t9k/mnt"},
    }
    assert made["data_there"] == "/t9k/mnt/examples" and made["train"]["zero"] == 2
    assert not plan_config(made["train"], 8).faults
    unmapped = dict(translate(read.read("small.yaml")).unmapped)
    assert "image with the embedded trainer" in unmapped["image"]
    (folder / "sleep.yaml").write_text(
        'kind: Job\nspec: {template: {containers: [{command: ["sleep", "inf"]}]}}'
    )
    with pytest.raises(UsageError, match="only: sleep inf"):
        read.read("sleep.yaml")
