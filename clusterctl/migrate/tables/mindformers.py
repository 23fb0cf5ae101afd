"""Keys of MindFormers' run_*.yaml, and options of its run_mindformer.py and run_distribute.sh."""

KEYS = """
seed | int | train.seed
run_mode | text | @run_mode
output_dir | text | - | results are in the run's folder
load_checkpoint resume_or_finetune_checkpoint | text | @load
src_strategy_path_or_dir | text | - | a checkpoint loads in any layout
auto_trans_ckpt | bool | - | a checkpoint loads in any layout
only_save_strategy | bool | - | a checkpoint loads in any layout
resume_training | bool | - | a run resumes automatically from its newest checkpoint
context.mode | int | - | there is one way to execute the model
context.device_target | text | @device
context.max_device_memory | text | train.hardware.memory
context.device_id | int | - | set by the launcher for each rank
context.enable_graph_kernel context.graph_kernel_flags context.max_call_depth context.save_graphs context.save_graphs_path context.jit_config context.jit_level context.memory_optimize_level context.ascend_config context.mempool_block_size | any | - | choices of MindSpore's compiler
remote_save_url | text | - | save: {to: ...} names an object store
runner_config.epochs | int | @epochs
runner_config.batch_size | int | train.micro_batch
runner_config.gradient_accumulation_steps | int | @accumulation
runner_config.image_size runner_config.sink_mode runner_config.sink_size runner_config.per_epoch_size runner_config.initial_epoch runner_config.has_trained_epoches runner_config.has_trained_steps | any | - | each rank reads its samples step by step
runner_wrapper.type | text | - | follows from precision and layout
runner_wrapper.scale_sense.type | text | - | loss_scale is dynamic if it is not a number
runner_wrapper.scale_sense.loss_scale_value | float | train.loss_scale.initial
runner_wrapper.scale_sense.scale_factor | int | - | the scale is halved and doubled
runner_wrapper.scale_sense.scale_window | int | train.loss_scale.window
runner_wrapper.use_clip_grad | bool | @clip
runner_wrapper.max_grad_norm | float | train.optimizer.clip
runner_wrapper.scale_sense runner_wrapper.enable_check_overflow | any | - | see train.loss_scale
use_parallel | bool | - | follows from the number of ranks
parallel.parallel_mode | int | @parallel_mode
parallel.full_batch | bool | - | each data parallel rank reads its own samples
parallel.enable_parallel_optimizer | bool | @zero
parallel.gradients_mean parallel.enable_alltoall parallel.loss_repeated_mean parallel.search_mode parallel.strategy_ckpt_save_file parallel.strategy_ckpt_config parallel.device_num parallel.parallel_optimizer_config parallel.dataset_strategy parallel.pipeline_config parallel_config.mem_coeff | any | - | internals of MindSpore's parallel modes
parallel_config.data_parallel | int | @data_parallel
parallel_config.model_parallel | int | train.parallel.tensor
parallel_config.pipeline_stage | int | train.parallel.pipeline
parallel_config.context_parallel | int | train.parallel.context
parallel_config.optimizer_shard | bool | @zero
parallel_config.use_seq_parallel | bool | train.parallel.sequence
parallel_config.micro_batch_num | int | @micro_batches
parallel_config.vocab_emb_dp | bool | - | the table is always divided by rows among the tensor parallel ranks, as if it were false
parallel_config.gradient_aggregation_group | int | - | gradients are exchanged in buckets
parallel_config.expert_parallel | int | - | tensor parallel ranks divide the experts
micro_batch_interleave_num | int | - | micro-batches are not split to overlap exchanges
moe_config.expert_num | words | @expert_counts
moe_config.num_experts_chosen | int | train.model.top_k
moe_config.capacity_factor | float | train.model.capacity
moe_config.aux_loss_factor | float | train.model.aux_loss
moe_config.norm_topk_prob | bool | train.model.renormalize
moe_config.shared_expert_num moe_config.first_k_dense_replace moe_config.n_group moe_config.balance_via_topk_bias | any | ! | it has shared experts, layers without experts, or a router with groups or a bias
moe_config.routing_policy moe_config.enable_sdrop moe_config.router_dense_type moe_config.use_fused_ops_topkrouter moe_config.z_loss_factor | any | - | one router: softmax, the best top_k, an auxiliary loss
recompute_config.recompute | any | @recompute
recompute_config.select_recompute | any | @select_recompute
recompute_config.recompute_slice_activation | bool | train.recompute.split
recompute_config.parallel_optimizer_comm_recompute recompute_config.mp_comm_recompute recompute_config.select_comm_recompute | any | - | exchanges of a recomputed layer are always repeated, and no others
auto_tune filepath_prefix autotune_per_step | any | - | tuning of MindSpore's data pipeline
profile | bool | @profile
profile_start_step profile_stop_step init_start_profile profile_communication profile_memory profiler_level | any | - | see train.profile
trainer.type trainer.model_name | text | - | the model is described by train.model
do_eval eval_step_interval eval_epoch_interval | any | - | train.eval decides
train_dataset.batch_size | int | - | runner_config.batch_size is used instead
train_dataset.data_loader.dataset_dir | text | @data
train_dataset.data_loader.shuffle | bool | - | samples are shuffled by data.seed
train_dataset train_dataset_task eval_dataset eval_dataset_task | any | - | corpora are .bin and .idx files that `clusterctl data build` makes
model.arch.type model.model_config.architectures | any | @architecture
model.model_config.type | text | @config_type
model.model_config.seq_length | int | train.model.sequence
model.model_config.vocab_size | int | train.model.vocab
model.model_config.hidden_size model.model_config.embedding_size | int | train.model.hidden
model.model_config.num_layers model.model_config.num_hidden_layers | int | train.model.layers
model.model_config.num_heads model.model_config.num_attention_heads | int | train.model.heads
model.model_config.n_kv_heads model.model_config.num_key_value_heads | int | train.model.query_groups
model.model_config.head_dim | int | train.model.head_dim
model.model_config.intermediate_size | int | train.model.ffn
model.model_config.multiple_of | int | @ffn_multiple
model.model_config.ffn_dim_multiplier | float | @ffn_multiplier
model.model_config.qkv_has_bias model.model_config.attention_bias | bool | @qkv_bias
model.model_config.qk_layernorm | bool | train.model.qk_norm
model.model_config.tie_word_embeddings | bool | train.model.tied
model.model_config.theta model.model_config.rope_theta | float | train.model.rope.base
model.model_config.extend_method | text | @rope_scaling
model.model_config.scaling_factor model.model_config.scaling_factor.factor | float | train.model.rope.factor
model.model_config.scaling_factor.original_max_position_embeddings | int | train.model.rope.original
model.model_config.scaling_factor.low_freq_factor | float | train.model.rope.low_freq
model.model_config.scaling_factor.high_freq_factor | float | train.model.rope.high_freq
model.model_config.scaling_factor.beta_slow | float | train.model.rope.beta_slow
model.model_config.scaling_factor.beta_fast | float | train.model.rope.beta_fast
model.model_config.pet_config | any | - | adapters are trained by train.tune: {lora: {rank: N}}
model.model_config.offset model.model_config.pp_interleave_num | any | - | layers are divided among the stages by `plan`
model.model_config.use_flash_attention model.model_config.use_prompt_flash_attention model.model_config.use_ring_attention model.model_config.use_attn_mask_compression model.model_config.input_sliced_sig model.model_config.qkv_concat model.model_config.fine_grain_interleave model.model_config.use_past_shard model.model_config.parallel_optimizer model.model_config.use_contiguous_weight_layout | any | - | chosen by the device: train.native
model.model_config.batch_size model.model_config.ignore_token_id model.model_config.block_size model.model_config.num_blocks model.model_config.is_dynamic model.model_config.use_cache model.model_config.max_position_embedding model.model_config.max_position_embeddings model.model_config.auto_register model.arch.auto_register model.model_config.rotary_pct model.model_config.rotary_emb_base model.model_config.kv_channels model.model_config.emb_dropout_prob model.model_config.compute_in_2d model.model_config.pretrain_seqlen | any | - | has no counterpart, or follows from another key
model.model_config.expand_ratio | int | @expand
model.model_config.hidden_act | text | @activation
model.model_config.hidden_dropout_rate model.model_config.dropout_rate model.model_config.dropout_prob model.model_config.hidden_dropout_prob | float | train.model.dropout
model.model_config.attention_dropout_rate model.model_config.attention_probs_dropout_prob model.model_config.attention_dropout | float | train.model.attention_dropout
model.model_config.layernorm_epsilon model.model_config.rms_norm_eps | float | train.model.eps
model.model_config.initializer_range | float | train.model.init_std
model.model_config.compute_dtype | text | @dtype
model.model_config.param_init_type model.model_config.embedding_init_type model.model_config.rotary_dtype | text | - | weights are kept in fp32
model.model_config.layernorm_compute_type model.model_config.softmax_compute_type model.model_config.layernorm_dtype model.model_config.softmax_dtype | text | - | both are computed in fp32
model.model_config.checkpoint_name_or_path | text | @load
model.model_config.eos_token_id model.model_config.eos_token | any | @eod
model.model_config.bos_token_id model.model_config.pad_token_id | int | - | the tokenizer defines them
model.model_config.repetition_penalty model.model_config.max_decode_length model.model_config.top_k model.model_config.top_p model.model_config.do_sample model.model_config.use_past | any | - | options of `clusterctl generate`
lr_schedule.type | text | @schedule
lr_schedule.learning_rate | float | train.optimizer.lr
lr_schedule.lr_end | float | train.optimizer.min_lr
lr_schedule.power | float | train.optimizer.power
lr_schedule.warmup_steps | int | @warmup_steps
lr_schedule.warmup_ratio | float | @warmup_part
lr_schedule.total_steps | int | @decay_steps
layer_scale layer_decay lr_scale lr_scale_factor | any | - | one rate for all layers
optimizer.type | text | @optimizer
optimizer.betas | any | @betas
optimizer.beta1 | float | @beta1
optimizer.beta2 | float | @beta2
optimizer.eps | float | train.optimizer.eps
optimizer.weight_decay | float | train.optimizer.weight_decay
optimizer.learning_rate | float | train.optimizer.lr
callbacks eval_callbacks metric processor | any | - | metrics, checkpoints and logs are always written
base_config | any | - | its files are read too, if they exist at the given paths
"""
OPTIONS = """
--config --config_path CONFIG_PATH | text | @config
--run_mode RUN_MODE | text | @run_mode
--use_parallel | bool | - | follows from the number of ranks
--dataset_dir --train_dataset_dir --dataset | text | @data
--eval_dataset_dir --dataset_id | text | - | name corpora in train.data
--load_checkpoint | text | @load
--resume_training | bool | - | a run resumes automatically from its newest checkpoint
--device_id | int | - | set by the launcher for each rank
--device_target | text | @device
--epochs | int | @epochs
--batch_size | int | train.micro_batch
--seed | int | train.seed
--predict_data | text | - | `clusterctl generate -p TEXT`
RANK_TABLE_FILE | text | - | every rank gets a table that the launcher builds and checks
DEVICE_RANGE | text | @range
RANK_SIZE | int | @world
"""
PROGRAMS = ("run_mindformer.py", "run_distribute.sh", "run_singlenode.sh")
DEFAULTS = {"train.eval.batches": 0, "train.model.vocab": 50257}
# What the architectures besides GPT-2 are.
LLAMA: dict[str, object] = {
    "train.model.norm": "rms",
    "train.model.rotary": True,
    "train.model.swiglu": True,
    "train.model.bias": "none",
    "train.model.tied": False,
    "train.model.vocab": 32_000,
}
ARCHITECTURES = {
    **{f"{name}ForCausalLM": LLAMA for name in ("Llama", "Mistral", "Mixtral", "ParallelLlama")},
    "Qwen2ForCausalLM": {**LLAMA, "train.model.bias": "qkv"},
    "Qwen3ForCausalLM": {**LLAMA, "train.model.qk_norm": True},
}
TITLE = "MindFormers"
