"""Options of programs that serve, generate, evaluate or convert, as options of our commands.

A target `@name` is a value that the command combines with others. An option that only the training tables have is named
in one line.
"""

MODEL = """
--load --load-pretrained --load_checkpoint --load-dir --src-path model.model_config.checkpoint_name_or_path load_checkpoint | text | @load
--vocab-file --vocab --tokenizer-model --tokenizer-name-or-path --tokenizer-path | text | --tokenizer
--merge-file | text | - | found next to the vocabulary file
--fp16 | flag | --weights=fp16
--bf16 | flag | --weights=bf16
--deepspeed --deepspeed_config --ds-inference --DDP-impl --distributed-backend --no-load-optim --no-load-rng --no-load-lr-scheduler --finetune --exit-on-missing-checkpoint --use-checkpoint-args --inference-batch-times-seqlen-threshold | any | - | follows from the checkpoint and the devices
--micro-batch-size --batch-size --eval-batch-size --global-batch-size --max-batch-size --inference-max-requests --batch_size | int | - | batches are chosen by length and memory
"""
SEVERAL = """
--tensor-model-parallel-size --model-parallel-size parallel_config.model_parallel | int | --tensor
--pipeline-model-parallel-size parallel_config.pipeline_stage | int | --pipeline
"""
SERVE = """
--port | int | --port
--host | text | --host
--out-seq-length --max-new-tokens --max-tokens-to-oom --temperature --top_p --top-p --top_k --top-k --seed | any | - | each request gives it
"""
GENERATE = """
--out-seq-length --max-new-tokens --max_new_tokens --num-tokens-to-generate model.model_config.max_decode_length | int | --max-tokens
--temperature model.model_config.temperature | float | --temperature
--top-k --top_k model.model_config.top_k | int | --top-k
--top-p --top_p model.model_config.top_p | float | --top-p
--greedy | flag | --temperature=0
model.model_config.do_sample | bool | @sample
--num-beams | int | --beams
--length-penalty | float | --length-penalty
--no-repeat-ngram-size | int | --no-repeat-ngram
--repetition-penalty model.model_config.repetition_penalty | float | --repetition-penalty
--num-samples | int | --samples
--sample-input-file --prompt-file | text | --prompts
--prompts --predict_data --prompt | text | --prompt
--seed seed | int | --seed
--genfile --sample-output-file --output-path | text | - | texts go to the standard output: end the command with > FILE
--recompute --cache-dir --input-source --hf-chat-template --task model.model_config.use_past | any | - | keys and values are always kept; texts come from --prompt and --prompts
"""
EVAL = """
--task --task_list | text | @task
--results_path --adaptive_seq_len --eval_fp32 --num_fewshot --inference --max-new-tokens --evaluation-batch-size | any | - | scored by tokens that fit in memory, without examples before the question
--valid-data --test-data --task-data-path --data-dir --data-path --dataset --dataset_dir --eval_dataset_dir | words | @file
--strict-lambada | flag | --convention=megatron-strict
--overlapping-eval | int | --stride
--pattern-id | int | --pattern
--save --overwrite --experiment-name --save-dir | any | - | results are written next to the run; --output names a folder
--tensor-model-parallel-size --model-parallel-size --pipeline-model-parallel-size | int | - | a device holds the whole model; --on NODES divides the documents
"""
IMPORT = """
--load-dir --load --src-path --input_path --load_dir | text | @load
--save-dir --save --dst-path --output_path --save_dir | text | --output
--model-type --model-type-hf --load-model-type --loader --saver --save-model-type --ckpt-cfg-path --model_type_hf --load_model_type --save_model_type --use-mcore-models | any | - | both formats are detected from the files; `checkpoint export --to FORMAT` writes another one
--target-tensor-parallel-size --target-pipeline-parallel-size --target-expert-parallel-size --tensor-model-parallel-size --pipeline-model-parallel-size | any | - | a checkpoint loads in any layout
--tokenizer-model --vocab-file | text | - | taken from the checkpoint's folder
"""
# The tables of each verb; the first that has an option counts.
TABLES = {
    "serve": (SERVE, SEVERAL, MODEL),
    "generate": (GENERATE, SEVERAL, MODEL),
    "eval": (EVAL, MODEL),
    "import": (IMPORT,),
}
# Tasks of other programs, by name, as tasks and conventions of ours.
TASKS = {
    "lambada": ("lambada", "megatron"),
    "lambda": ("lambada", ""),
    "wikitext103": ("wikitext", "megatron"),
    "wikitext": ("wikitext", "megatron"),
    "language_model": ("ppl", ""),
    "lm": ("ppl", ""),
    "copa": ("copa", ""),
    "multichoice": ("choice", ""),
    "hellaswag": ("choice", ""),
}
# Tasks of GLM's finetune_glm.py that only evaluate.
EVALUATED = ("lambda", "wikitext", "lm", "language_model", "multichoice")
SERVERS = ("run_text_generation_server.py", "run_inference_server.py")
GENERATORS = ("generate_samples.py", "generate_samples_gpt.py", "inference.py", "run_text_generation.py")
EVALUATORS = ("tasks/main.py", "evaluation.py", "eval_harness/evaluate.py")
CONVERTERS = (
    "tools/checkpoint/convert.py",
    "tools/checkpoint/util.py",
    "convert_ckpt.py",
    "convert_ckpt_v2.py",
)
# Programs that are known and have no counterpart, with the reason.
REFUSED = {
    "pretrain_bert.py": "BERT reads in both directions: the embedded trainer trains decoders and GLM",
    "pretrain_t5.py": "T5 has an encoder and a decoder: the embedded trainer trains decoders and GLM",
    "pretrain_ict.py": "a retriever of two BERTs: the embedded trainer trains decoders and GLM",
    "pretrain_retro.py": "a model that reads neighbours from a data base has no counterpart",
    "pretrain_vlm.py": "a model of images and texts has no counterpart",
    "pretrain_vision_classify.py": "a model of images has no counterpart",
    "pretrain_vision_dino.py": "a model of images has no counterpart",
    "pretrain_vision_inpaint.py": "a model of images has no counterpart",
    "pretrain_mamba.py": "a state-space model (Mamba) has no counterpart",
    "pretrain_hybrid.py": "a state-space model (Mamba) has no counterpart",
    "train_fsdp2.py": "its configuration is a file of that trainer; name the folder of the weights: init --from DIR",
    "train_rl.py": "reinforcement learning has no counterpart; `train.tune` has the task dpo",
}
