#!/usr/bin/env bash
# Fills an image with one environment for both roles: this project and what constraints/gpu.txt pins. headway.def and headway.Dockerfile both
# call it, so there is one way to make an image.
#   install.sh          install, as the image's root; the environment is /opt/headway/venv
#   install.sh check    does what is installed start, and does it fit together? Needs no GPU
# HEADWAY_DRY_RUN=1: only resolve; nothing is installed, so it needs neither an image nor root. HEADWAY_PYTHON: an interpreter other than python3.12.
set -euo pipefail

SOURCE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=/opt/headway/venv
PYTHON=${HEADWAY_PYTHON:-python3.12}
UV=0.13.9
# SGLang compiles kernels while it runs, and Triton its launchers: g++ and Python's headers stay in the image. libnuma is for SGLang's kernels;
# libibverbs and its drivers are for NCCL over InfiniBand; libmunge is for SLURM's clients, which a site mounts (docs/slurm.md).
PACKAGES=(python3.12 python3.12-venv python3.12-dev gcc g++ libnuma1 libibverbs1 ibverbs-providers libmunge2)

system() {
    export DEBIAN_FRONTEND=noninteractive
    # Where the builder is root in a user namespace alone, apt cannot become its own user.
    local apt=(apt-get -qq -y -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" install --no-install-recommends "${PACKAGES[@]}"
    # The base image brings an NCCL of its own: the one beside torch is to be the only one.
    local nccl
    nccl=$(dpkg-query -W -f '${Package}\n' 'libnccl*' 2>/dev/null || true)
    # shellcheck disable=SC2086
    [[ -z $nccl ]] || "${apt[@]}" purge --allow-change-held-packages $nccl
    rm -rf /var/lib/apt/lists/*
}

resolve_or_install() { # [FURTHER ARGUMENTS OF uv]: into $VENV, with a uv that does not stay
    "$PYTHON" -m venv "$work/uv"
    "$work/uv/bin/pip" install --quiet --disable-pip-version-check "uv==$UV"
    "$PYTHON" -m venv "$VENV"
    "$work/uv/bin/uv" pip install --no-cache --python "$VENV/bin/python" -c "$SOURCE/constraints/gpu.txt" "$@" "${SOURCE}[gpu]"
}

check() {
    cd / # what is installed, not the sources
    "$VENV/bin/headway" --help >/dev/null
    local cuda
    cuda=$("$VENV/bin/python" -c '
import megatron.core, sglang, torch, workers
nccl = ".".join(map(str, torch.cuda.nccl.version()))
versions = f"torch {torch.__version__}, NCCL {nccl}, megatron-core {megatron.core.__version__}, SGLang {sglang.__version__}"
print(torch.version.cuda, versions)' | tail -n 1) # after what they print themselves
    echo "${cuda#* }"
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version | grep "release ${cuda%% *}," || {
        echo "nvcc of ${CUDA_HOME:-/usr/local/cuda} is not of torch's CUDA, ${cuda%% *}: take a base image of that version" >&2
        exit 1
    }
}

case ${1:-} in
    check) check ;;
    "")
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        if [[ ${HEADWAY_DRY_RUN:-} ]]; then
            VENV=$work/venv
            echo "in an image, apt would install: ${PACKAGES[*]}"
            resolve_or_install --dry-run
        else
            system
            resolve_or_install --compile-bytecode
        fi
        ;;
    *)
        echo "install.sh: '$1' is not known: nothing, or check" >&2
        exit 2
        ;;
esac
