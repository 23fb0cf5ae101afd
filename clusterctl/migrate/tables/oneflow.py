"""Options of oneflow_gpt.training, where they differ from Megatron's, and of its launch_container.py."""

OPTIONS = """
--learning-rate --lr | float | train.optimizer.lr
--num-gpus-per-node | int | @devices
--num-nodes | int | @nodes
--node-ips | text | @addresses
--num-accumulation-steps | int | @accumulation
--ctrl-port | int | - | the launcher chooses a free port
--node-rank | int | - | set by the launcher
--use-rdma | bool | @rdma
--multihead-attention-fusion | flag | - | always: the fused attention of the device
--no-scale-tril-softmax-dropout-fusion | flag | - | chosen by the device: train.native
--dataset | text | @data
--use-external-dataset | flag | - | .bin and .idx files are read
--checkpoint-activations | flag | @recompute
--save-last | flag | - | the last step is always saved
--save-init | flag | - | a run starts from the job's seed or from train.init
--log | text | - | logs are in the run's folder
--metric-print-format | text | - | `status` and `report` show metrics
--profile-transformer-layer | flag | train.profile.repeat=1
"""
CONTAINER = """
--src | text | - | the embedded trainer replaces the program's source
--py | text | - | `python` of the inventory names the nodes' Python
--image | text | - | `container: {image: ...}` of the job names an image with the embedded trainer
--wheel | text | - | `nodes setup` installs the trainer's packages
--cmd | text | @command
--extra-mount --proxy --no-interactive | any | - | `container: {image: ..., mounts: ...}` of the job
--deploy --server-host --master-ip --port | any | - | set by the launcher
"""
PROGRAMS = ("oneflow_gpt.training", "oneflow_gpt/training.py", "launch_container.py")
DEFAULTS = {
    "train.model.dropout": 0.1,
    "train.model.attention_dropout": 0.1,
    "train.optimizer.weight_decay": 0.01,
    "train.optimizer.betas": [0.9, 0.999],
    "train.optimizer.schedule": "linear",
    "train.data.split": "969,30,1",
    "train.log_every": 100,
}
TITLE = "OneFlow GPT"
