"""Keys of torchtitan's TOML files, which `torchtitan.train` reads; newer versions have Python instead."""

KEYS = """
job experiment comm fault_tolerance memory_estimation debug profiler | any | - | runs, logs and exchanges are described by the job
profiling | any | - | train.profile
model.name | text | @titan_model
model.flavor | text | @titan_flavor
model.hf_assets_path model.tokenizer_path | text | @tokenizer
model.converters model.print_after_conversion model.norm_type | any | - | one implementation of the model
optimizer.name | text | @optimizer
optimizer.lr | float | train.optimizer.lr
optimizer.eps | float | train.optimizer.eps
optimizer.beta1 | float | @beta1
optimizer.beta2 | float | @beta2
optimizer.weight_decay | float | train.optimizer.weight_decay
optimizer.implementation optimizer.early_step_in_backward optimizer.fused | any | - | one AdamW, chosen by the device
lr_scheduler.warmup_steps | int | @warmup_steps
lr_scheduler.decay_type | text | @schedule
lr_scheduler.min_lr_factor lr_scheduler.lr_min | float | @lr_ratio
lr_scheduler.decay_ratio | float | - | set train.optimizer.decay: the decay begins later than the training
training.local_batch_size training.batch_size | int | train.micro_batch
training.global_batch_size | int | @titan_batch
training.seq_len | int | train.model.sequence
training.max_norm | float | train.optimizer.clip
training.steps | int | train.steps
training.seed | int | train.seed
training.deterministic | bool | train.deterministic=true
training.mixed_precision_param | text | @dtype
training.mixed_precision_reduce training.gc_freq training.gc_debug training.enable_cpu_offload training.compile | any | - | chosen by the device and the precision
training.dataset training.dataset_path | text | - | corpora are .bin and .idx files that `clusterctl data build` makes
parallelism.tensor_parallel_degree training.tensor_parallel_degree | int | train.parallel.tensor
parallelism.pipeline_parallel_degree experimental.pipeline_parallel_degree | int | train.parallel.pipeline
parallelism.context_parallel_degree experimental.context_parallel_degree | int | train.parallel.context
parallelism.data_parallel_shard_degree training.data_parallel_shard_degree | int | @titan_shards
parallelism.data_parallel_replicate_degree training.data_parallel_replicate_degree | int | - | the ranks that are left are data parallel
parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree | int | - | tensor parallel ranks divide the experts
parallelism.enable_async_tensor_parallel parallelism.enable_loss_parallel parallelism.disable_loss_parallel parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_split_points parallelism.fsdp_reshard_after_forward parallelism.context_parallel_rotate_method experimental.enable_async_tensor_parallel experimental.pipeline_parallel_schedule parallelism | any | - | follows from the layout
checkpoint.enable checkpoint.enable_checkpoint | bool | @titan_saving
checkpoint.interval | int | train.save.every
checkpoint.keep_latest_k | int | train.save.keep
checkpoint.initial_load_path | text | @load
checkpoint | any | - | checkpoints are in the run's folder; `checkpoint export` writes other formats
activation_checkpoint.mode | text | @titan_recompute
activation_checkpoint | any | - | see train.recompute
metrics.log_freq | int | train.log_every
metrics.enable_tensorboard | bool | train.tensorboard=true
metrics | any | - | `status` and `report` show metrics
validation.freq | int | train.eval.every
validation.steps | int | train.eval.batches
validation.enable | bool | @titan_validation
validation.dataset validation.local_batch_size validation.seq_len | any | - | name a corpus in train.data
compile quantize float8 mx | any | - | products are computed in the precision of the job
"""
# Models by name and flavor, as presets.
PRESETS = {
    **{f"llama3 {size}": f"llama3.1-{size}" for size in ("8B", "70B", "405B")},
    **{f"qwen3 {size}": f"qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{"qwen3 30B-A3B": "qwen3-30B-A3B", "qwen3 235B-A22B": "qwen3-235B-A22B"},
}
# torchtitan's own defaults, where those of the job differ.
DEFAULTS = {
    "train.optimizer.lr": 8e-4,
    "train.optimizer.betas": [0.9, 0.95],
    "train.optimizer.eps": 1e-8,
    "train.optimizer.weight_decay": 0.1,
    "train.optimizer.schedule": "linear",
    "train.optimizer.warmup": "200 steps",
    "train.precision": "bf16",
    "train.steps": 10_000,
    "train.micro_batch": 8,
    "train.model.sequence": 2048,
    "train.log_every": 10,
    "train.eval.batches": 0,
}
TITLE = "torchtitan"
OPTIONS = """
--job.config_file --config_file | text | @config
--module --config | text | ! | its configuration is Python; name a folder of its weights: init --from DIR
"""
PROGRAMS = ("torchtitan.train", "torchtitan/train.py")
