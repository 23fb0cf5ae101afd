"""Options of GLM's pretraining and fine-tuning, where they differ from Megatron's."""

OPTIONS = """
--block-lm | flag | train.model.kind=glm
--task-mask | flag | - | always: [MASK], [sMASK] and [gMASK] have their own tokens
--bert-prob | float | train.data.infilling.words
--gap-sentence-prob | float | train.data.infilling.sentences
--bert-ratio --gap-sentence-ratio | float | train.data.infilling.ratio
--gpt-min-ratio | float | train.data.infilling.least_rest
--avg-block-length | float | train.data.infilling.span
--single-span-prob | float | train.data.infilling.one_span
--short-seq-prob | float | train.data.windows.short_chance
--block-mask-prob | float | train.data.infilling.hide
--no-shuffle-block | flag | train.data.infilling.shuffle=false
--gpt-infill-prob | float | - | set train.data.infilling.inside to the same number
--no-block-position --no-fixed-bert-prob --encoder-decoder --sentinel-token --masked-lm | flag | - | the embedded trainer has no such model
--context-mask-ratio --context-mask-range | float | - | not supported
--variable-num-blocks --fast-decode --batch-size-increase | any | - | not supported
--filter-english | flag | - | `data build --language en` filters once, before the training
--experiment-name | text | name
--batch-size | int | train.micro_batch
--train_micro_batch_size_per_gpu | int | train.micro_batch
--gradient-accumulation-steps | int | @accumulation
--model-parallel-size | int | train.parallel.tensor
--epochs | int | @epochs
--warmup | float | @warmup_part
--lr-decay-ratio | float | @lr_ratio
--label-smoothing | float | train.model.label_smoothing
--intermediate-size | int | train.model.ffn
--stage | int | train.zero
--attention-scale | float | - | attention scores are computed in fp32 where precision requires it
--deep-init | flag | - | always on: matrices that add to the residual start smaller by the root of 2 x layers
--fp32-embedding --fp32-layernorm --fp32-tokentypes --fp32-allreduce | flag | - | layer norms and updates are in fp32
--min-scale | float | train.loss_scale.least
--cpu_torch_adam | flag | train.offload=true
--train-data | words | @data
--valid-data | words | @valid_data
--test-data | words | - | name a test corpus with `clusterctl eval`
--data-dir --data_path --data-path | text | @data_folder
--lazy-loader --no-lazy-loader --loader-scatter --loader-fraction --presplit-sentences --loose-json --shuffle --resume-dataloader | any | - | corpora are memory-mapped files that `clusterctl data build` makes; a resume continues at the next sample
--text-key --delim --input-data-sizes-file --num-workers --tokenizer-path --tokenizer-model-type | any | - | an option of `clusterctl data build`
--task | text | @task
--multi-token --continuous-prompt --num-prompt-tokens --loss-func --prefix-prompt --pattern-id --fast-decode | any | - | see train.tune for the tasks and their wording
--save-epoch --eval-epoch | int | - | a task is evaluated and saved after every epoch
--load-pretrained | text | @load
--cloze-eval --no-load-lr-scheduler --finetune | flag | - | follows from the task; training starts with the weights alone
--output-dropout | float | - | dropout of the residual stream is train.model.dropout
--eval-iters-final | any | - | train.eval decides
--overwrite | flag | - | every run has a folder of its own
--new-hyperparameters | flag | - | the job gives all hyperparameters
--hostfile --include --exclude | text | - | nodes are chosen by the inventory, -n and -x
--summary-dir | text | train.tensorboard=true | the files are in the run's folder
--eval-batch-size --eval-seq-length --eval-max-preds-per-seq --overlapping-eval --eval-text-key | any | - | an evaluation has batches of the training's size
--temperature --top_k --top_p --out-seq-length --num-beams --length-penalty --no-repeat-ngram-size --min-tgt-length --select-topk | any | - | options of `clusterctl generate`
--transformer-xl --pretrained-bert --mem-length | any | - | the embedded trainer has no such model
"""
PROGRAMS = ("pretrain_glm.py", "pretrain_gpt2_glm.py", "finetune_glm.py")
DEFAULTS = {
    "train.model.kind": "glm",
    "train.model.dropout": 0.1,
    "train.model.attention_dropout": 0.1,
    "train.optimizer.weight_decay": 0.01,
    "train.optimizer.betas": [0.9, 0.999],
    "train.optimizer.schedule": "linear",
    "train.data.split": "1000,1,1",
    "train.eval.every": 1000,
    "train.eval.batches": 100,
    "train.log_every": 100,
}
TITLE = "GLM"
