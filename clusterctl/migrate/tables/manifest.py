"""Keys of a job's manifest for Kubernetes, next to the command of its containers."""

KEYS = """
replicas completions numNodes | int | @nodes
slotsPerWorker numProcPerNode | int | @devices
nvidia.com/gpu huawei.com/Ascend910 huawei.com/ascend-1980 | int | @devices
image | text | - | kubernetes: {image: ...} names an image with the embedded trainer; see examples/images
queue | text | kubernetes.queue
priority | any | - | `clusterctl submit` hands a job to a cluster with queues
cpu | text | kubernetes.cpus
memory | text | kubernetes.memory
claimName claims | any | @claims
localRank | bool | - | every rank finds LOCAL_RANK in its environment
"""
