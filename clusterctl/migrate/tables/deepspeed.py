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
prescale_gradients | bool | - | gradients are averaged before or after the sum without a difference in fp32
wall_clock_breakdown | bool | - | train.profile and `status` show where the time goes
zero_allow_untested_optimizer | bool | - | the embedded trainer's optimizer is used
"""
