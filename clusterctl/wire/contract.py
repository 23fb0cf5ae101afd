"""The names of environment variables and files by which launcher and trainer reach each other."""

from __future__ import annotations

# Variables of torch.distributed. Global rank.
RANK = "RANK"
# Rank on this node.
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
# The index of the node.
GROUP_RANK = "GROUP_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# Variables of CANN and HCCL; set if the node's devices are NPUs.
RANK_ID = "RANK_ID"
RANK_SIZE = "RANK_SIZE"
DEVICE_ID = "DEVICE_ID"
RANK_TABLE_FILE = "RANK_TABLE_FILE"
ASCEND_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"

# Where CANN writes its logs of a process.
PLOG_PATH = "ASCEND_PROCESS_LOG_PATH"

# Set for each node.
HCCL_IF_IP = "HCCL_IF_IP"
HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"

# Variables of clusterctl. Also the marker by which a run's processes are found in /proc/*/environ.
RUN_ID = "CLUSTERCTL_RUN_ID"
# The run's folder on this node.
RUN_DIR = "CLUSTERCTL_RUN_DIR"
# 1, 2, ...
ATTEMPT = "CLUSTERCTL_ATTEMPT"
# The node's name in the inventory.
NODE = "CLUSTERCTL_NODE"
# cpu, cuda or npu.
DEVICE_KIND = "CLUSTERCTL_DEVICE_KIND"
# Set in the pods that `clusterctl submit` describes: the platform, and facts that the platform's own variables lack.
POD_PLATFORM = "CLUSTERCTL_PLATFORM"
# The number of nodes.
POD_COUNT = "CLUSTERCTL_PODS"
# Their addresses in order.
POD_PEERS = "CLUSTERCTL_PEERS"
# The number of devices on each of them.
POD_DEVICES = "CLUSTERCTL_DEVICES"
# The name of a run's folder on a shared disk or in an object store, if it is not the run id: each pod of a job starts
# its own run, and a new run when its platform restarts it.
SAVED_AS = "CLUSTERCTL_SAVED_AS"
# On the launching machine: the command that installs an extra of the package; {extra} is its name.
INSTALL = "CLUSTERCTL_INSTALL"
# A folder of this node that all runs may share.
CACHE_DIR = "CLUSTERCTL_CACHE_DIR"

# Files that the trainer writes below RUN_DIR and the launcher reads. One JSON object per line: event, step, loss,
# tokens_per_second, ...
METRICS_FILE = "metrics.jsonl"
# Results of `clusterctl eval`, in the folder of a run on the launching machine.
EVALUATIONS_DIR = "evaluations"
# Folders such as step-00000100, each with a manifest.json.
CHECKPOINT_DIR = "checkpoints"
# One file per rank, rank-N: the last finished step, and the seconds that this rank itself took for it.
HEARTBEAT_DIR = "heartbeat"
# What the calls of a launched function returned: attempt-A-rank-N.
RESULTS_DIR = "results"
# The profiler's traces of this node's ranks.
PROFILE_DIR = "profile"
# Files for TensorBoard.
TENSORBOARD_DIR = "tensorboard"
# The job's train part, written by the launcher.
TRAIN_CONFIG_FILE = "train.json"

# glibc returns large buffers to the kernel at each step and maps them again. Keeping them makes a CPU 1.2 to 1.5 times
# as fast (docs/performance.md). glibc reads these variables before main().
MALLOC_TUNING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
