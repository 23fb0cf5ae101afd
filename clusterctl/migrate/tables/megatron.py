"""Options of pretrain_gpt.py in Megatron-LM and Megatron-DeepSpeed."""

OPTIONS = """
--num-layers --encoder-num-layers | int | train.model.layers
--hidden-size | int | train.model.hidden
--ffn-hidden-size | int | train.model.ffn
--num-attention-heads | int | train.model.heads
--kv-channels | int | train.model.head_dim
--group-query-attention | flag | - | follows from --num-query-groups
--num-query-groups --num-key-value-heads | int | train.model.query_groups
--seq-length --encoder-seq-length | int | train.model.sequence
--max-position-embeddings | int | train.model.positions
--position-embedding-type | text | @positions
--use-rotary-position-embeddings | flag | train.model.rotary=true
--no-position-embedding | flag | - | rotary positions have no position table
--rotary-base --rope-theta --rotary-position-embeddings-theta | float | train.model.rope.base
--rotary-percent | float | train.model.rope.part
--swiglu | flag | train.model.swiglu=true
--normalization | text | @normalization
--disable-bias-linear | flag | train.model.bias=none
--add-qkv-bias | flag | @qkv_bias
--qk-layernorm | flag | train.model.qk_norm=true
--untie-embeddings-and-output-weights | flag | train.model.tied=false
--layernorm-epsilon --norm-epsilon | float | train.model.eps
--make-vocab-size-divisible-by | int | train.model.vocab_multiple
--vocab-size --padded-vocab-size | int | train.model.vocab
--init-method-std | float | train.model.init_std
--hidden-dropout | float | train.model.dropout
--attention-dropout | float | train.model.attention_dropout
--openai-gelu | flag | train.model.activation=gelu_tanh
--bias-gelu-fusion | flag | - | chosen by the device: train.native
--no-bias-gelu-fusion | flag | - | chosen by the device: train.native
--no-masked-softmax-fusion | flag | - | chosen by the device: train.native
--no-bias-dropout-fusion | flag | - | dropout is not fused here
--num-experts --num-moe-experts | words | @expert_counts
--moe-router-topk --topk | int | train.model.top_k
--moe-aux-loss-coeff --moe-loss-coeff | float | train.model.aux_loss
--train-iters | int | train.steps
--train-samples | int | @samples
--train-tokens | int | @tokens
--micro-batch-size | int | train.micro_batch
--global-batch-size | int | train.global_batch
--batch-size | int | - | replaced by --micro-batch-size in Megatron-LM itself
--rampup-batch-size | words | @ramp
--lr | float | train.optimizer.lr
--min-lr | float | train.optimizer.min_lr
--lr-decay-style | text | @schedule
--lr-decay-iters | int | @decay_steps
--lr-decay-samples | int | @decay_samples
--lr-decay-tokens | int | @decay_tokens
--lr-warmup-fraction | float | @warmup_part
--lr-warmup-iters --warmup-iters | int | @warmup_steps
--lr-warmup-samples | int | @warmup_samples
--lr-warmup-tokens | int | @warmup_tokens
--lr-wsd-decay-style | text | - | wsd always decays linearly
--override-lr-scheduler --override-opt_param-scheduler | flag | - | the job always decides; a checkpoint holds no schedule
--use-checkpoint-opt_param-scheduler | flag | - | the job always decides; a checkpoint holds no schedule
--optimizer | text | @optimizer
--weight-decay | float | train.optimizer.weight_decay
--adam-beta1 | float | @beta1
--adam-beta2 | float | @beta2
--adam-eps | float | train.optimizer.eps
--clip-grad | float | train.optimizer.clip
--fp16 | flag | train.precision=fp16
--bf16 | flag | train.precision=bf16
--loss-scale | float | @fixed_scale
--initial-loss-scale | float | train.loss_scale.initial
--min-loss-scale | float | train.loss_scale.least
--loss-scale-window | int | train.loss_scale.window
--hysteresis | int | train.loss_scale.hysteresis
--accumulate-allreduce-grads-in-fp32 | flag | - | always: gradients are added and exchanged in fp32
--attention-softmax-in-fp32 | flag | - | scores are computed in fp32
--no-query-key-layer-scaling | flag | - | queries and keys are not scaled by the layer
--apply-query-key-layer-scaling | flag | - | queries and keys are not scaled by the layer
--tensor-model-parallel-size --model-parallel-size | int | train.parallel.tensor
--pipeline-model-parallel-size | int | train.parallel.pipeline
--num-layers-per-virtual-pipeline-stage | int | @virtual_layers
--context-parallel-size --ds-sequence-parallel-size | int | train.parallel.context
--sequence-parallel | flag | train.parallel.sequence=true
--expert-model-parallel-size | int | - | tensor parallel ranks divide the experts
--no-pipeline-parallel | flag | - | parallel.pipeline is 1 if left out
--use-distributed-optimizer | flag | train.zero=1
--overlap-grad-reduce | flag | - | exchanges overlap with the backward pass where the device allows
--overlap-param-gather | flag | - | exchanges overlap with the backward pass where the device allows
--DDP-impl | text | - | there is one way to exchange gradients
--distributed-backend | text | - | follows from the device: gloo, NCCL or HCCL
--distributed-timeout-minutes | int | - | hang_after finds ranks that hang, and names them
--local_rank --local-rank | int | - | set by the launcher
--lazy-mpu-init | text | - | an internal option of Megatron
--use-cpu-initialization | flag | - | initial weights are always drawn on the CPU, so that all layouts start with the same weights
--cpu-optimizer | flag | train.offload=true
--checkpoint-activations --recompute-activations --deepspeed-activation-checkpointing | flag | @recompute
--recompute-granularity | text | train.recompute.mode
--recompute-method | text | - | whole layers are recomputed
--recompute-num-layers --checkpoint-num-layers | int | train.recompute.every
--distribute-saved-activations --distribute-checkpointed-activations --partition-activations | flag | train.recompute.split=true
--contigious-checkpointing --synchronize-each-layer --profile-backward --checkpoint-in-cpu | flag | - | has no counterpart; activations stay on the device
--use-flash-attn --use-flash-attn-v2 | flag | - | always: the fused attention of the device
--transformer-impl | text | - | chosen by the device: train.native
--use-mcore-models --use-legacy-models | flag | - | there is one implementation of the model
--data-path | words | @data
--train-data-path | words | @train_data
--valid-data-path | words | @valid_data
--test-data-path | words | - | name a test corpus with `clusterctl eval`
--data-impl | text | - | both .bin/.idx formats are recognised
--data-cache-path | text | - | indices are cached on each node
--split | text | train.data.split
--tokenizer-type | text | @tokenizer_type
--tokenizer-model --tokenizer-name-or-path | text | @tokenizer
--vocab-file --vocab | text | @vocab_file
--merge-file | text | - | found next to the vocabulary file
--vocab-extra-ids | int | - | a tokenizer file has its own special tokens
--num-workers | int | - | samples are read by the rank itself, from memory-mapped files
--dataloader-type | text | - | the order of the samples is always that of Megatron-core
--mmap-warmup | flag | - | the operating system caches pages
--eod-mask-loss | flag | train.data.mask_eod_loss=true
--reset-position-ids | flag | train.data.reset_positions=true
--reset-attention-mask | flag | train.data.reset_attention=true
--create-attention-mask-in-dataloader --no-create-attention-mask-in-dataloader | flag | - | masks are made on the device
--save | text | @save
--load | text | @load
--save-interval | int | train.save.every
--no-save-optim | flag | train.save.state=weights
--no-save-rng --no-load-rng | flag | - | dropout follows from seed and step, so that there is no generator to save
--no-load-optim | flag | - | train.init begins with weights alone
--finetune | flag | @finetune
--exit-interval --exit-duration-in-mins | int | - | `clusterctl stop` saves and ends; a resumed run continues
--use-checkpoint-args | flag | - | the job describes the model
--ckpt-format --dist-ckpt-format | text | - | one format for every layout; `checkpoint export` writes others
--eval-interval | int | train.eval.every
--eval-iters | int | train.eval.batches
--log-interval | int | train.log_every
--tensorboard-dir | text | train.tensorboard=true | the files are in the run's folder
--tensorboard-queue-size --tensorboard-log-interval | int | - | every step is written
--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard | flag | - | always, with TensorBoard
--log-optimizer-states-to-tensorboard --log-learning-rate-to-tensorboard --log-num-zeros-in-grad | flag | - | learning rate and gradient norm are always written
--log-params-norm --log-throughput --timing-log-level --log-memory-to-tensorboard | any | - | `status` and `report` show rates and memory
--wandb-project --wandb-exp-name --wandb-save-dir | text | - | `report` and `compare` show runs; `notify` calls other services
--profile | flag | train.profile.repeat=1
--profile-step-start | int | train.profile.wait
--profile-step-end | int | - | set train.profile.active to the number of steps
--profile-ranks | words | train.profile.ranks
--use-pytorch-profiler | flag | - | train.profile is torch's profiler
--seed | int | train.seed
--deterministic-mode | flag | train.deterministic=true
--master-addr --master-port | text | - | set by the launcher
--deepspeed | flag | train.engine=deepspeed
--no-deepspeed | flag | train.engine=torch
--deepspeed_config --deepspeed-config | text | @deepspeed_config
--deepspeed_mpi | flag | - | the launcher starts the ranks
--zero-stage | int | train.zero
--zero-reduce-bucket-size --zero-allgather-bucket-size | float | - | set them in engine: {deepspeed: FILE}
--zero-contigious-gradients | flag | - | set it in engine: {deepspeed: FILE}
--remote-device | text | - | offload of parameters: engine: {deepspeed: FILE}
--curriculum-learning --curriculum-learning-legacy --data-efficiency-curriculum-learning | flag | - | its lengths are in the DeepSpeed configuration: train.curriculum
--label-smoothing | float | train.model.label_smoothing
"""
PROGRAMS = ("pretrain_gpt.py", "pretrain_gpt2.py", "pretrain_gpt_mcore.py", "posttrain_gpt.py")
# The program's defaults, where those of the job differ.
DEFAULTS = {
    "train.model.dropout": 0.1,
    "train.model.attention_dropout": 0.1,
    "train.optimizer.weight_decay": 0.01,
    "train.optimizer.betas": [0.9, 0.999],
    "train.optimizer.schedule": "linear",
    "train.data.split": "969,30,1",
    "train.eval.every": 1000,
    "train.eval.batches": 100,
    "train.log_every": 100,
}
TITLE = "Megatron"
