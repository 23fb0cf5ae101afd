"""Keys of a DeepSpeed configuration."""

KEYS = """
train_batch_size | int | train.global_batch
train_micro_batch_size_per_gpu | int | train.micro_batch
gradient_accumulation_steps | int | @accumulation
gradient_clipping | float | train.optimizer.clip
steps_per_print | int | train.log_every
fp16.enabled | bool | @fp16
fp16.loss_scale | float | @fixed_scale
fp16.initial_scale_power | int | @scale_power
fp16.loss_scale_window | int | train.loss_scale.window
fp16.hysteresis | int | train.loss_scale.hysteresis
fp16.min_loss_scale | float | train.loss_scale.least
bf16.enabled bfloat16.enabled | bool | @bf16
zero_optimization.stage | int | train.zero
optimizer.type | text | @optimizer
optimizer.params.lr | float | train.optimizer.lr
optimizer.params.betas | any | train.optimizer.betas
optimizer.params.eps | float | train.optimizer.eps
optimizer.params.weight_decay | float | train.optimizer.weight_decay
zero_optimization.cpu_offload zero_optimization.offload_optimizer | any | @cpu_offload
zero_optimization.offload_param | any | - | offload of parameters: engine: {deepspeed: FILE}
zero_optimization.contiguous_gradients zero_optimization.overlap_comm zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions zero_optimization.elastic_checkpoint zero_optimization.round_robin_gradients zero_optimization.sub_group_size zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.load_from_fp32_weights | any | - | buffers and files of DeepSpeed: its own values are used; engine: {deepspeed: FILE} passes others
activation_checkpointing | any | - | train.recompute
optimizer.params.torch_adam optimizer.params.adam_w_mode optimizer.params.bias_correction | any | - | one AdamW, chosen by the device
communication_data_type data_types gradient_predivide_factor sparse_gradients fp16.auto_cast fp16.consecutive_hysteresis | any | - | exchanges are in the type of the gradients
tensorboard wandb csv_monitor flops_profiler comms_logger dump_state memory_breakdown monitor_config aio checkpoint elasticity hybrid_engine compression_training pipeline | any | - | set it in engine: {deepspeed: FILE} if it is needed
scheduler | any | - | give the schedule as train.optimizer: {schedule, warmup, decay}
prescale_gradients | bool | - | in fp32 it makes no difference whether gradients are averaged before or after the sum
wall_clock_breakdown | bool | - | train.profile and `status` show where the time goes
zero_allow_untested_optimizer | bool | - | the embedded trainer's optimizer is used
curriculum_learning.enabled data_efficiency.data_sampling.curriculum_learning.enabled | bool | @curriculum_on
curriculum_learning.curriculum_type data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.curriculum_type | text | @curriculum_kind
curriculum_learning.min_difficulty data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.min_difficulty | int | @curriculum_start
curriculum_learning.max_difficulty data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.max_difficulty | int | @curriculum_whole
curriculum_learning.schedule_type data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.schedule_type | text | @curriculum_schedule
curriculum_learning.schedule_config.total_curriculum_step data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.schedule_config.total_curriculum_step | int | @curriculum_steps
curriculum_learning.schedule_config.difficulty_step data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.schedule_config.difficulty_step | int | @curriculum_multiple
curriculum_learning.schedule_config.root_degree data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen_truncate.schedule_config.root_degree | float | @curriculum_root
data_efficiency.enabled | bool | - | train.curriculum is on if it has a start
data_efficiency.seed data_efficiency.data_sampling.enabled | any | - | train.seed determines the order of samples
"""
# The sections with a curriculum. They are also read if a command names the file.
CURRICULUM = ("curriculum_learning.", "data_efficiency.data_sampling.curriculum_learning.")
# Keys that count more than Megatron's options: the engine itself reads them.
STRONGER = (*CURRICULUM, "zero_optimization.stage", "fp16.", "bf16.", "bfloat16.")
