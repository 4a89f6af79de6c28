#!/bin/bash
# vecd embed as a Slurm array: each task embeds its share of the files that a manifest names. See docs/bulk.md.
#
#   find /data/texts -name '*.jsonl' | sort > manifest.txt     # a line for each input; about ten minutes of work in each
#   sbatch deploy/bulk/slurm.sh manifest.txt /data/vectors --model BAAI/bge-small-en-v1.5 -- --dtype float32
#
# What follows the first two words is passed on to `vecd embed`. --dtype float32 gives all nodes the same vectors: the
# default chooses by processor. Submit it again at any time: outputs that are complete are skipped. To repeat some tasks
# of 40 alone: NUM_SHARDS=40 sbatch --array=7,9 deploy/bulk/slurm.sh …
#SBATCH --job-name=vecd-embed
#SBATCH --array=0-39
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --time=04:00:00
# After the loss of its node or a preemption, a task begins again, and goes on where the last journal ends.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=vecd-embed-%A-%a.log
set -uo pipefail

manifest=${1:?the first word names the manifest}
output_dir=${2:?the second word names the folder of the outputs}
shift 2

# A shared server would end with the task that started it: Slurm kills what a task has left. Rows without a text
# are NaN, so that row i of an output is row i of its input; with --output-dir they do not change the exit code.
vecd embed --manifest "$manifest" --output-dir "$output_dir" \
  --shard "$SLURM_ARRAY_TASK_ID/${NUM_SHARDS:-$SLURM_ARRAY_TASK_COUNT}" \
  --output-format npy --on-bad-row blank --no-share-server "$@"
status=$?

# 1: inputs are left, for example because an object store stalled. Slurm repeats by itself only when a node is lost. The
# other codes are final: 0 is complete, and 2 a mistake that a repeat does not mend.
if [[ $status -eq 1 && ${SLURM_RESTART_COUNT:-0} -lt 5 ]]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$status"
