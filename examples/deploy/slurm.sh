#!/bin/bash
# One run on several nodes of a Slurm cluster: `sbatch examples/deploy/slurm.sh my.yaml rollout=gpu trainer=gpu`.
# The first node has the driver and the Trainer, the others have the engines (docs/deploy.md). Submit it again with the
# same arguments to continue the run from its last checkpoint, on the same or other nodes.
#SBATCH --job-name=asyncrl
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# SIGTERM reaches this script two minutes before the end of the job, and the run writes a checkpoint.
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append

set -euo pipefail

: "${ASYNCRL_SHARED:?export ASYNCRL_SHARED=<a directory that all nodes see>, where checkpoints go}"
: "${ASYNCRL_VENV:=$PWD/.venv}"
port=${RAY_PORT:-6379}
gpus=${SLURM_GPUS_ON_NODE:-8}
name=${ASYNCRL_RUN:-$SLURM_JOB_NAME}  # the run, which all jobs of this name continue

source "$ASYNCRL_VENV/bin/activate"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes[0]}
head_address=$(srun --nodes=1 --ntasks=1 --nodelist="$head_node" hostname --ip-address | awk '{print $1}')

# One token for all nodes of this job. Without it, everybody who reaches the port could run code as this user.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1

start_node() { # HOST LABELS ARGUMENT...
  local host=$1 labels=$2
  shift 2
  srun --nodes=1 --ntasks=1 --nodelist="$host" --overlap \
    ray start "$@" --labels="$labels" --num-gpus="$gpus" --num-cpus="$SLURM_CPUS_ON_NODE" --block &
}

start_node "$head_node" pool=train --head --node-ip-address="$head_address" --port="$port" --include-dashboard=false
for _ in $(seq 60); do
  ray health-check --address "$head_address:$port" 2>/dev/null && break
  sleep 2
done
for host in "${nodes[@]:1}"; do
  start_node "$host" pool=rollout --address="$head_address:$port"
done
# A launch is refused at once if the cluster can never hold it, so all nodes have to be there before.
all_joined='import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))'
for _ in $(seq 60); do
  python -c "$all_joined" "$head_address:$port" "${#nodes[@]}" 2>/dev/null && break
  sleep 2
done

# The run directory is on the first node's own disk; checkpoints are on shared storage, so another node can go on.
defaults=(
  run_dir="${SLURM_TMPDIR:-/tmp}/asyncrl-$name-$SLURM_JOB_ID" trainer.checkpoint_dir="$ASYNCRL_SHARED/$name" resume=auto
  timeouts.stop_s=100  # of the two minutes: the step in progress ends, and the checkpoint is written
  trainer.nnodes=1 trainer.n_gpus_per_node="$gpus" 'trainer.node_labels={pool: train}'
  rollout.nnodes=$((${#nodes[@]} - 1)) rollout.n_gpus_per_node="$gpus" 'rollout.node_labels={pool: rollout}'
)
added=()  # those that the arguments of this script do not set themselves
for default in "${defaults[@]}"; do
  [[ " $* " == *" ${default%%=*}="* ]] || added+=("$default")
done
srun --nodes=1 --ntasks=1 --nodelist="$head_node" --overlap \
  asyncrl launch fully_async "$@" ray.address="$head_address:$port" "${added[@]}" &
run=$!
trap 'kill -TERM "$run"' TERM INT
status=0
wait "$run" || status=$?
# `wait` ends early when a signal arrives; the run is still writing its checkpoint then.
while kill -0 "$run" 2>/dev/null; do
  status=0
  wait "$run" || status=$?
done
exit "$status"
