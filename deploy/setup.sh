#!/usr/bin/env bash
# Make .venv from the lock of a platform: deploy/setup.sh [cpu|gpu]. A complete set-up is recognised at once.
#
#   PYTHON=python3.12       the interpreter to build on (default: the first of python3, python3.11, ... that fits)
#   PIP_FIND_LINKS, pip.conf's find-links and index-url are passed on to uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

platform=${1:-cpu}
lock=requirements/$platform.txt
venv=.venv
marker=$venv/.set-up            # written last: the platform and the digest of what was installed
unfinished=$venv/.unfinished    # there while packages are being installed
uv_version=0.13.9
torch_cpu_index=https://download.pytorch.org/whl/cpu
num_steps=5
PATH=${PATH//"$PWD/$venv/bin:"/} # an active .venv must not be what .venv is made with

fail() { # WHAT REMEDY
  printf '\nset-up: %s. %s\n' "$1" "$2" >&2
  exit 1
}

step() { # NUMBER NAME
  current="step $1 of $num_steps ($2)"
  printf '[%s/%s] %s\n' "$1" "$num_steps" "$2"
}

# -- what the machine must have -------------------------------------------------------------------------------------

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

check_machine() {
  [[ -f $lock ]] || fail "the platform must be cpu or gpu, got '$platform'" "Run \`make setup PLATFORM=cpu\` or \`PLATFORM=gpu\`"
  [[ $(uname -s) == Linux ]] ||
    fail "the system must be Linux, got $(uname -s)" "Use a Linux machine, container or WSL 2: vLLM has no wheels elsewhere"
  python=$(find_python) ||
    fail "Python must be 3.11 to 3.14, got $({ "${PYTHON:-python3}" --version 2>/dev/null || echo none; } | head -1)" \
      "Install it (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: PYTHON=/path/to/python3.11 make setup"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python must have the modules venv and ensurepip, got none" "Install them (Debian, Ubuntu: apt-get install python3-venv)"
  "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h")).close()' 2>/dev/null ||
    fail "Python.h of $python must be there for DeepSpeed's and Triton's kernels, got none" \
      "Install it (Debian, Ubuntu: apt-get install python3-dev)"
  command -v g++ >/dev/null ||
    fail "g++ must be installed for DeepSpeed's and PyTorch's kernels, got none" "Install it (Debian, Ubuntu: apt-get install g++)"
  command -v make >/dev/null || fail "make must be installed, got none" "Install it (Debian, Ubuntu: apt-get install make)"
  [[ -e $marker ]] || check_disk
}

check_disk() {
  local needed_gb=8 free_kb
  if [[ $platform == gpu ]]; then needed_gb=25; fi
  free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
  ((free_kb >= needed_gb * 1000 * 1000)) ||
    fail "the disk of $PWD must have $needed_gb GB free, got $((free_kb / 1000 / 1000)) GB" "Free some, or clone to another disk"
}

# -- the steps --------------------------------------------------------------------------------------------------------

make_venv() {
  if [[ -e $unfinished ]]; then
    echo "      the last set-up was interrupted: starting again from an empty $venv"
    rm -rf "$venv"
  fi
  if [[ -d $venv ]] && ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "      the Python of $venv is too old or gone: starting again"
    rm -rf "$venv"
  fi
  if [[ ! -d $venv ]]; then
    mkdir "$venv"
    touch "$unfinished" # before anything else lies in it
    "$python" -m venv "$venv" || fail "$current failed" "See the message above; \`$python -m venv $venv\` repeats it alone"
  fi
  touch "$unfinished"
  rm -f "$marker"
}

install_uv() {
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$venv/bin/python" -m ensurepip >/dev/null || fail "$current failed" "Remove $venv and repeat"
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version" ||
    fail "$current failed" "See pip's message above: pip must reach a package index (behind a proxy or mirror, configure pip)"
  uv=$venv/bin/uv
}

pip_setting() { # NAME: what pip's configuration says, or nothing
  "$venv/bin/python" -m pip config get "$1" 2>/dev/null || true
}

configure_uv() {
  local place
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
  find_links=()
  for place in ${PIP_FIND_LINKS:-} $(pip_setting global.find-links) $(pip_setting install.find-links); do
    [[ " ${find_links[*]} " == *" $place "* ]] || find_links+=(--find-links "$place")
  done
  local index=${PIP_INDEX_URL:-$(pip_setting global.index-url)}
  if [[ -n $index && -z ${UV_DEFAULT_INDEX:-} ]]; then export UV_DEFAULT_INDEX=$index; fi
}

install() { # ARGUMENTS of uv pip install
  local quiet=()
  [[ -t 2 ]] || quiet=(--quiet) # progress for a person, not for a log
  "$uv" pip install --python "$venv/bin/python" --no-deps "${quiet[@]}" "${find_links[@]}" "$@"
}

# torch's CPU build is on no package index but PyTorch's own. It is asked for torch alone, and only where pip's own
# places (find-links, or a mirror that carries it) do not have the wheel.
install_torch() {
  local torch log
  torch=$(grep -E '^torch==' "$lock") || fail "$lock must name torch, got no such line" "Run \`make lock\`"
  log=$(mktemp)
  if install "$torch" >"$log" 2>&1; then
    cat "$log"
  elif [[ $torch == *+cpu ]]; then
    echo "      not in pip's find-links: asking PyTorch's CPU index"
    UV_DEFAULT_INDEX=$torch_cpu_index install "$torch" || {
      cat "$log" >&2
      fail "$current failed" "Without access to $torch_cpu_index, put the wheel of $torch into a folder and name it: PIP_FIND_LINKS=FOLDER make setup"
    }
  else
    cat "$log" >&2
    fail "$current failed" "See uv's message above: uv must reach a package index"
  fi
  rm -f "$log"
}

install_packages() {
  local others
  others=$(mktemp)
  grep -vE '^torch==' "$lock" >"$others"
  install --requirement "$others" ||
    fail "$current failed" "See uv's message above: uv must reach a package index and the disk must have room; then repeat"
  rm -f "$others"
}

install_rlooper() {
  install --no-build-isolation --editable . || fail "$current failed" "See the message above: pyproject.toml must build"
  "$venv/bin/python" -c 'import torch, transformers' ||
    fail "$current failed: torch and transformers must import" "Remove $venv and repeat: another package stands in their way"
}

# -- all of it --------------------------------------------------------------------------------------------------------

if command -v flock >/dev/null && [[ -z ${RLOOPER_SETUP_LOCKED:-} ]]; then
  RLOOPER_SETUP_LOCKED=1 exec flock deploy/setup.sh bash deploy/setup.sh "$platform" # two set-ups take turns
fi

check_machine
digest="$platform $(cat "$lock" pyproject.toml deploy/setup.sh | sha256sum | cut -d' ' -f1)"
if [[ -e $marker && $(<"$marker") == "$digest" && -x $venv/bin/python ]]; then
  exit 0
fi
SECONDS=0
step 1 "make $venv with $("$python" --version)"
make_venv
step 2 "install uv"
install_uv
configure_uv
step 3 "install torch"
install_torch
step 4 "install the packages of $lock"
install_packages
step 5 "install rlooper, editable"
install_rlooper
echo "$digest" >"$marker"
rm -f "$unfinished"
echo "set-up complete in $SECONDS s"
