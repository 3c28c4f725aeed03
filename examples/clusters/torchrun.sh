#!/bin/bash
# torchrun, elastic: HOST=one-of-them torchrun.sh train.py [its arguments], on each of one to four nodes
# When a rank fails, or a node comes or goes, all ranks start again; ppe_ddp.Checkpointer goes on from the last step saved.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a node that comes back finds no address
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --nnodes=1:4 --nproc-per-node="${RANKS:-4}" --max-restarts=3 \
    --rdzv-id="${JOB:-train}" --rdzv-backend=c10d --rdzv-endpoint="${HOST:?the name of one node}:${PORT:-29500}" "$@"
