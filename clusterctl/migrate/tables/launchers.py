"""Options of launchers, which come before the training program in a command."""

OPTIONS = """
--nproc_per_node --nproc-per-node --num_gpus --num_processes | int | @devices
--nnodes --num_nodes --num_machines --num-nodes | text | @nodes
--node_rank --node-rank --machine_rank --rank --local_rank | any | - | set by the launcher for each node
--master_addr --master-addr --main_process_ip --rdzv_endpoint --rdzv-endpoint --rdzv_backend --rdzv-backend --rdzv_id --rdzv-id | text | - | the first node of the run
--master_port --master-port --main_process_port | int | - | the launcher chooses a free port; master_port in the job
--hostfile -H --hostfile= | text | - | `clusterctl init --hostfile` turns it into an inventory
--include -i --exclude -e | text | - | -n and -x of `clusterctl launch`
--launcher --launcher_args --ssh_port | any | - | nodes are reached as the inventory says
--max_restarts --max-restarts | int | restart.max
--log_dir --log-dir --redirects --tee | any | - | logs of every rank are in the run's folder
--with-ssh | flag | - | pdsh is not needed: nodes are reached over SSH
--bind_cores_to_rank --force_multi --no_python --no_local_rank --standalone --use_env | flag | - | set by the launcher
-n -np -N --ntasks --nodes --ntasks-per-node --gres --partition -p | any | - | `clusterctl submit`, and the job's part for the batch system
"""
