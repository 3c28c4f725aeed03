#!/bin/bash
# mpirun of MPICH or Open MPI: mpirun.sh HOST:RANKS [HOST:RANKS ...] -- python train.py
# Start it on one of the hosts; the others are reached by ssh, without a password.
set -euo pipefail

file=$(mktemp)
trap 'rm -f "$file"' EXIT
ranks=0
mpi=$(mpirun --version 2>&1)
while [[ $# -gt 0 && $1 != -- ]]; do
    case $mpi in
        *"Open MPI"*) echo "${1%:*} slots=${1##*:}" >> "$file" ;;
        *) echo "$1" >> "$file" ;;
    esac
    ranks=$((ranks + ${1##*:}))
    shift
done
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
case $mpi in
    *"Open MPI"*) mpirun --hostfile "$file" -n "$ranks" -x PATH -x OMP_NUM_THREADS "$@" ;; # it passes on no others
    *) mpirun -f "$file" -n "$ranks" -genv OMP_NUM_THREADS "$OMP_NUM_THREADS" "$@" ;;
esac
