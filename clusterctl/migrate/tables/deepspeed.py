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
