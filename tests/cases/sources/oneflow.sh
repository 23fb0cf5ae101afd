# two nodes
NODES=2
LAYERS=24; GPUS=${GPUS:-4}
ARGS="--num-layers $LAYERS \
  --hidden-size 1024"
python3 tools/launch_container.py --src $PWD --py 3.7 --image of:0.1 --wheel x.whl \
  --cmd "python3 -m oneflow_gpt.training $ARGS --dataset data/gpt_text_document --seq-length 1024 --num-attention-heads 16 \
     --micro-batch-size 4 --global-batch-size $((4 * GPUS * NODES * 2)) --num-accumulation-steps 2 --num-gpus-per-node $GPUS --num-nodes $NODES --node-ips 10.0.0.1,10.0.0.2 --train-iters 500000 \
     --learning-rate 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction 0.01 --initial-loss-scale 4294967296 --optimizer adamw \
     --weight-decay 1e-2 --clip-grad 1.0 --vocab-size 50257 --split 949,50,1 --load checkpoint --save checkpoint --save-interval 10000 --log-interval 100 --checkpoint-activations --multihead-attention-fusion --fp16 --use-rdma --node-rank $(hostname) --log \$HOME/x"
