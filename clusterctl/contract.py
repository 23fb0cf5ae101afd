"""The names that pass from launcher to trainer: the one seam between the packages.

The trainer spells its side in `trainer/env.py`; `tests/test_rules.py` holds the two to each other.
"""

from __future__ import annotations

# torch's own names, and what they mean here.
# Global rank.
RANK = "RANK"
# Rank on this node.
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
# The node's place among the nodes.
GROUP_RANK = "GROUP_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# Ascend's names; set where the node's devices are of that kind.
RANK_ID = "RANK_ID"
RANK_SIZE = "RANK_SIZE"
DEVICE_ID = "DEVICE_ID"
RANK_TABLE_FILE = "RANK_TABLE_FILE"
ASCEND_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"

# Where CANN writes its logs of a process.
PLOG_PATH = "ASCEND_PROCESS_LOG_PATH"

# Filled per node.
HCCL_IF_IP = "HCCL_IF_IP"
HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"

# Ours.
# Also the marker that a sweep looks for in /proc/*/environ.
RUN_ID = "CLUSTERCTL_RUN_ID"
# The run's folder on this node.
RUN_DIR = "CLUSTERCTL_RUN_DIR"
# 1, 2, ...
ATTEMPT = "CLUSTERCTL_ATTEMPT"
# The node's name in the inventory.
NODE = "CLUSTERCTL_NODE"
# Cpu | cuda | npu.
DEVICE_KIND = "CLUSTERCTL_DEVICE_KIND"
# A folder of this node that all runs may share.
CACHE_DIR = "CLUSTERCTL_CACHE_DIR"

# Files that the trainer writes below RUN_DIR and the launcher reads.
# One JSON object a line: event, step, loss, tokens_per_second, ...
METRICS_FILE = "metrics.jsonl"
# Step-00000100/ folders, each with a manifest.json.
CHECKPOINT_DIR = "checkpoints"
HEARTBEAT_DIR = (
    # Rank-N: the last finished step, and the seconds that this rank itself took for it.
    "heartbeat"
)
# What the calls of a launched function returned: attempt-A-rank-N.
RESULTS_DIR = "results"
# The profiler's traces of this node's ranks.
PROFILE_DIR = "profile"
# The job's train part, written by the launcher.
TRAIN_CONFIG_FILE = "train.json"

# glibc gives large buffers back to the kernel at each step and faults them in again;
# keeping them is worth 1.2 to 1.5 times on CPU (docs/performance.md). Read by glibc before main().
MALLOC_TUNING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
