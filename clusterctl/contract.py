"""The names that pass from launcher to trainer: the one seam between the packages.

The trainer spells its side in `trainer/env.py`; `tests/test_rules.py` holds the two to each other.
"""

from __future__ import annotations

# torch's own names, and what they mean here.
RANK = "RANK"  # global rank
LOCAL_RANK = "LOCAL_RANK"  # rank on this node
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"  # the node's place among the nodes
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# Ascend's names; set where the node's devices are of that kind.
RANK_ID = "RANK_ID"
RANK_SIZE = "RANK_SIZE"
DEVICE_ID = "DEVICE_ID"
RANK_TABLE_FILE = "RANK_TABLE_FILE"
ASCEND_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"

PLOG_PATH = "ASCEND_PROCESS_LOG_PATH"  # where CANN writes its logs of a process

# Filled per node.
HCCL_IF_IP = "HCCL_IF_IP"
HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"

# Ours.
RUN_ID = "CLUSTERCTL_RUN_ID"  # also the marker that a sweep looks for in /proc/*/environ
RUN_DIR = "CLUSTERCTL_RUN_DIR"  # the run's folder on this node
ATTEMPT = "CLUSTERCTL_ATTEMPT"  # 1, 2, ...
NODE = "CLUSTERCTL_NODE"  # the node's name in the inventory
DEVICE_KIND = "CLUSTERCTL_DEVICE_KIND"  # cpu | cuda | npu
CACHE_DIR = "CLUSTERCTL_CACHE_DIR"  # a folder of this node that all runs may share

# Files that the trainer writes below RUN_DIR and the launcher reads.
METRICS_FILE = "metrics.jsonl"  # one JSON object a line: event, step, loss, tokens_per_second, ...
CHECKPOINT_DIR = "checkpoints"  # step-00000100/ folders, each with a manifest.json
HEARTBEAT_DIR = (
    "heartbeat"  # rank-N: the last finished step, and the seconds that this rank itself took for it
)
PROFILE_DIR = "profile"  # the profiler's traces of this node's ranks
TRAIN_CONFIG_FILE = "train.json"  # the job's train part, written by the launcher

# glibc gives large buffers back to the kernel at each step and faults them in again;
# keeping them is worth 1.2 to 1.5 times on CPU (docs/performance.md). Read by glibc before main().
MALLOC_TUNING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
