#!/usr/bin/env bash
#SBATCH --job-name=rlooper
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@600
# A Ray of all nodes of a Slurm job, and one run on it:
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh RECIPE.yaml ... [key=value ...]
#
# The job's exit code is that of the run. 600 s before the time limit, or at `scancel --batch --signal=TERM JOB`, the run saves a
# checkpoint and ends with 3; the same command with train.resume=auto goes on.
#   RLOOPER_NODES_WAIT_S   how long the nodes may take to join (default 300)
set -euo pipefail

fail() {
  echo "slurm.sh: $1" >&2
  exit 1
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "must run inside a Slurm job, got none. Start it with sbatch."
(($# > 0)) || fail "must be given a recipe, got nothing. Write: sbatch --nodes=N deploy/slurm.sh RECIPE.yaml [key=value ...]"
cd "${SLURM_SUBMIT_DIR:-.}"
[[ ! -d .venv ]] || export PATH="$PWD/.venv/bin:$PATH"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
port=$((20000 + SLURM_JOB_ID % 20000)) # other jobs may share this network
wait_s=${RLOOPER_NODES_WAIT_S:-300}

# a token for this job alone; srun passes the environment on, and nothing prints it
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN
export RAY_ADDRESS=$head:$port

common=(--block --disable-usage-stats --dashboard-agent-listen-port=0
  "--num-cpus=${SLURM_CPUS_ON_NODE:-1}" "--num-gpus=${SLURM_GPUS_ON_NODE:-0}")
parts=() run='' asked=''
# shellcheck disable=SC2329  # called by the traps
end() {
  trap - EXIT TERM INT
  for part in "${parts[@]}"; do kill "$part" 2>/dev/null || true; done
  wait || true
}
# shellcheck disable=SC2329
ask() { # the run saves and ends
  asked=1
  [[ -z $run ]] || kill -TERM "$run" 2>/dev/null || true
}
trap end EXIT
trap ask TERM INT

srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head "--port=$port" "--ray-client-server-port=$((port + 1))" \
  --include-dashboard=false "--temp-dir=${TMPDIR:-/tmp}/ray-$SLURM_JOB_ID" "${common[@]}" &
parts+=($!)

nodes_that_joined() {
  python -c 'import ray; ray.init(address="auto", logging_level="ERROR", log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))' \
    2>/dev/null || echo 0
}

wait_for() { # NUMBER of nodes
  local joined=0
  while ((joined < $1)); do
    ((SECONDS < wait_s)) || fail "$1 nodes must join within $wait_s s, got $joined of ${hosts[*]}. See the output of ray above."
    kill -0 "${parts[0]}" 2>/dev/null || fail "the head of Ray must run on $head, got its end. See the output of ray above."
    sleep 1
    [[ -z $asked ]] || exit 3
    joined=$(nodes_that_joined)
  done
}

SECONDS=0
wait_for 1 # workers give up on a head that is not there yet
if ((${#hosts[@]} > 1)); then
  others=$((${#hosts[@]} - 1))
  srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start "--address=$RAY_ADDRESS" "${common[@]}" &
  parts+=($!)
  wait_for "${#hosts[@]}"
fi

python -m orchestrator train "$@" cluster.address=auto &
run=$!
[[ -z $asked ]] || ask
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal ends `wait` before the run has saved
  code=0
  wait "$run" || code=$?
done
exit "$code"
