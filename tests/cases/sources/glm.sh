MP_SIZE=1
gpt_options=" \
   --block-lm --task-mask --bert-prob 0.5 --gap-sentence-prob 0.3 --avg-block-length 3 --gpt-min-ratio 0.25 --block-mask-prob 0.1 --short-seq-prob 0.02 \
   --experiment-name blocklm-10b --model-parallel-size ${MP_SIZE} --num-layers 48 --hidden-size 4096 --num-attention-heads 64 --seq-length 512 --max-position-embeddings 1024 \
   --save /data/ckpt --train-iters 250000 --train-data pile --tokenizer-type GPT2BPETokenizer --lr 1e-4 --lr-decay-style cosine --lr-decay-ratio 0.1 --lr-decay-iters 175000 --warmup 0.04 --checkpoint-activations --fp16 --label-smoothing 0.1 --batch-size 12"
gpt_options="${gpt_options}
   --deepspeed"
deepspeed --num_nodes 2 --num_gpus 8 pretrain_glm.py ${gpt_options} $@
