"""Keys of a job's manifest for Kubernetes, next to the command of its containers."""

KEYS = """
replicas completions numNodes | int | @nodes
slotsPerWorker numProcPerNode | int | @devices
nvidia.com/gpu huawei.com/Ascend910 huawei.com/ascend-1980 | int | @devices
image | text | - | `container: {image: ...}` of the job names an image with the embedded trainer
queue priority | any | - | `clusterctl submit` hands a job to a cluster with queues
cpu memory | any | - | `clusterctl submit` writes the limits of a container
claimName | text | - | `data:` is pushed to the nodes; `data_there:` names a folder that they have
localRank | bool | - | every rank finds LOCAL_RANK in its environment
"""
