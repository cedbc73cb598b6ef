#!/bin/bash
# Several nodes under flux.
#
#     flux batch -N 2 -t 60m several_nodes.sh
#
# The script is told how long it may train: 55 of 60 minutes. It then saves and ends with code 75, and goes on
# when it is submitted again.

export OMP_NUM_THREADS=2
MASTER_ADDR=$(hostname)  # flux starts this script where rank 0 will run
MASTER_PORT=$((20000 + RANDOM % 10000))
export MASTER_ADDR MASTER_PORT

flux run -N 2 -n 8 -c 2 python checkpoints_with_time_limit.py 3300
