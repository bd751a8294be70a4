# shellcheck shell=bash disable=SC2034
# Sourced by the scripts beside it: settings of a local cluster, each an environment variable, and what all the scripts need.

HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
PATH=$PATH:/usr/sbin:/sbin
ME=$(id -un)
FOLDER=${HEADWAY_SLURM_DIR:-/tmp/headway-slurm-$(id -u)}
STATE=$(realpath -m "$FOLDER")

SETTINGS=(NINF NTRN GPUS_INF GPUS_TRN CPUS MEMORY ACCOUNT MAX_ARRAY_SIZE KILL_WAIT GRACE_TIME SHORT_MINUTES USER_SIGNAL ISOLATE)
: "${NINF:=3}" "${NTRN:=1}"              # nodes inf0.. and trn0..
: "${GPUS_INF:=1}" "${GPUS_TRN:=1}"      # fake GPUs of each
: "${CPUS:=8}" "${MEMORY:=8000}"         # of each node, in MB; need not exist
: "${ACCOUNT:=research}"                 # the one account there is
: "${MAX_ARRAY_SIZE:=1001}"
: "${KILL_WAIT:=30}"                     # seconds between TERM and KILL
: "${GRACE_TIME:=30}"                    # seconds a preempted job still has
: "${SHORT_MINUTES:=3}"                  # time limit of partition "short"
: "${USER_SIGNAL:=1}"                    # 1: a preempted job gets the signal of its --signal option; 0: only TERM
: "${ISOLATE:=$((EUID == 0))}"           # 1: each node a host of its own (needs root); 0: all nodes are this host

say() { printf '%s\n' "$*" >&2; }

fail() { say "slurm/local: $*"; exit 1; }

check_owner() { # what stands in the folder is run: nobody else may have put it there
    [[ ! -L ${FOLDER%/} ]] || fail "$FOLDER is a link: give the folder itself, or choose another HEADWAY_SLURM_DIR"
    [[ ! -e $STATE ]] || [[ -d $STATE && -O $STATE && -z $(find "$STATE" -maxdepth 0 -perm /022) ]] ||
        fail "$STATE is not a folder that $ME alone may write to: choose another HEADWAY_SLURM_DIR"
}
check_owner

wait_for() { # SECONDS COMMAND..: until the command succeeds
    local -i deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || return 1
        sleep 0.05
    done
}

alive() { # PID: it exists and is no zombie
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) && [[ ${stat##*) } != Z* ]]
}

start() { # NAME COMMAND..: in the background, free of this terminal, its pid in run/NAME.pid
    local name=$1
    shift
    setsid env -i PATH="$PATH" HOME="${HOME:-/}" LANG=C SLURM_CONF="$STATE/etc/slurm.conf" MYSQL_UNIX_PORT="$STATE/database/socket" \
        "$@" </dev/null >>"$STATE/log/$name.out" 2>&1 &
    echo $! >"$STATE/run/$name.pid"
}

running() { # NAME: a process that start() started; a pid that now belongs to somebody else does not count
    local pid
    pid=$(cat "$STATE/run/$1.pid" 2>/dev/null) && alive "$pid" && grep -qsF "$STATE" "/proc/$pid/environ" "/proc/$pid/cmdline"
}

stop() { # NAME [SIGNAL]: end it and wait until it is gone
    if running "$1"; then
        local pid
        pid=$(cat "$STATE/run/$1.pid")
        kill "-${2:-TERM}" "$pid"
        wait_for 15 gone "$pid" || { kill -9 "$pid"; wait_for 5 gone "$pid"; }
    fi
    rm -f "$STATE/run/$1.pid"
}

gone() { ! alive "$1"; }

start_controller() {
    start slurmctld slurmctld -D -f "$STATE/etc/slurm.conf"
    wait_for 30 controller_answers || fail "slurmctld does not answer; see $STATE/log/slurmctld.log"
}

start_accounting() {
    start slurmdbd slurmdbd -D
    SLURM_CONF=$STATE/etc/slurm.conf wait_for 30 sacctmgr --noheader list cluster || fail "slurmdbd does not answer; see $STATE/log/slurmdbd.out"
}

controller_answers() { [[ $(SLURM_CONF=$STATE/etc/slurm.conf timeout 5 scontrol ping) == *UP* ]]; }
