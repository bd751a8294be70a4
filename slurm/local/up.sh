#!/usr/bin/env bash
# Bring up a real SLURM cluster on this machine and wait until all its nodes are idle. Settings: settings.sh; for what: README.md.
# Its last line is the one to paste: export SLURM_CONF=...
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$HERE/nodes.sh"

settings_text() { local name; for name in "${SETTINGS[@]}"; do echo "$name=${!name}"; done; }

render() { # TEMPLATE: with every @NAME@ replaced by that variable
    local text name
    text=$(<"$1")
    while [[ $text =~ @([A-Z_]+)@ ]]; do
        name=${BASH_REMATCH[1]}
        text=${text//"@$name@"/${!name}}
    done
    printf '%s\n' "$text"
}

claim_slot() { # a number that no other local cluster uses, for addresses, ports and interface names
    local -i number
    for number in {0..19}; do
        if ((ISOLATE)); then
            SLOT=$number
            ip link add "hws$SLOT" type bridge 2>/dev/null || continue
            ip address add "10.77.$SLOT.1/24" dev "hws$SLOT"
            ip link set "hws$SLOT" up
        else
            SLOT=$((20 + number))
            ! (: <"/dev/tcp/127.0.0.1/$(port 0)") 2>/dev/null || continue
        fi
        echo "SLOT=$SLOT" >>"$STATE/settings"
        return
    done
    fail "20 local clusters are running already"
}

write_nodes() { # NODE_LINES and gres.conf
    local name gpus device=$STATE/dev/gpu index
    mkdir "$STATE/dev"
    for ((index = 0; index < (GPUS_INF > GPUS_TRN ? GPUS_INF : GPUS_TRN); index++)); do
        # A GPU is any character device: root makes ones that have no driver.
        mknod "$STATE/dev/gpu$index" c 240 "$index" 2>/dev/null || device=/dev/tty
    done
    NODE_LINES=
    echo AutoDetect=off >"$STATE/etc/gres.conf"
    for name in $(node_names); do
        gpus=$GPUS_INF
        [[ $name == trn* ]] && gpus=$GPUS_TRN
        NODE_LINES+="NodeName=$name $(node_address "$name") CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS"
        NODE_LINES+=" ThreadsPerCore=1 RealMemory=$MEMORY Gres=gpu:$gpus State=UNKNOWN"$'\n'
        echo "NodeName=$name Name=gpu File=${device}[0-$((gpus - 1))]" >>"$STATE/etc/gres.conf"
    done
}

# shellcheck disable=SC2034  # the templates use these variables
write_configuration() {
    CONTROLLER=$(hostname -s) CONTROLLER_ADDRESS=127.0.0.1 PORT=$(port 0) DATABASE_PORT=$(port 1)
    ((ISOLATE)) && CONTROLLER_ADDRESS=10.77.$SLOT.1
    MEMORY_PER_CPU=$((MEMORY / CPUS)) INFERENCE_NODES="inf[0-$((NINF - 1))]" TRAIN_NODES="trn[0-$((NTRN - 1))]"
    PROCTRACK=linuxproc TASK_PLUGIN=none CONTROLLER_PARAMETERS=
    ((USER_SIGNAL)) && CONTROLLER_PARAMETERS=SlurmctldParameters=preempt_send_user_signal
    if uses_cgroups; then
        PROCTRACK=cgroup TASK_PLUGIN=cgroup
        cp "$HERE/conf/cgroup.conf" "$STATE/etc/"
    fi
    DATABASE_FILES=/usr/share/mariadb # since MariaDB 11
    [[ -e $DATABASE_FILES/mariadb_system_tables.sql ]] || DATABASE_FILES=/usr/share/mysql
    write_nodes
    write_hosts >"$STATE/etc/hosts"
    echo "nameserver 127.0.0.1" >"$STATE/etc/resolv.conf" # nobody there: names that are not in the hosts file fail at once
    render "$HERE/conf/slurm.conf.in" >"$STATE/etc/slurm.conf"
    (umask 077 && render "$HERE/conf/slurmdbd.conf.in" >"$STATE/etc/slurmdbd.conf")
    render "$HERE/conf/mariadb.cnf.in" >"$STATE/database/mariadb.cnf"
    cp "$HERE/conf/accounts.sql" "$STATE/database/"
}

start_munge() {
    (umask 077 && head -c 128 /dev/urandom >"$STATE/munge/key")
    start munged munged --foreground --force --socket="$STATE/munge/socket" --key-file="$STATE/munge/key" --pid-file="$STATE/run/munged.own.pid" \
        --log-file="$STATE/log/munged.log" --seed-file="$STATE/munge/seed"
    wait_for 10 munge -S "$STATE/munge/socket" -n || fail "munged does not answer"
}

start_database() {
    mkdir -m 700 "$STATE"/database/{data,temporary}
    {
        printf 'create database if not exists mysql;\nuse mysql;\n'
        cat "$DATABASE_FILES"/m*_{system_tables,performance_tables,system_tables_data}.sql
    } | mariadbd --defaults-file="$STATE/database/mariadb.cnf" --init-file= --bootstrap >"$STATE/log/database-tables.log" 2>&1 ||
        fail "MariaDB's tables could not be made: $(tail -n 3 "$STATE/log/database-tables.log" "$STATE/log/mariadbd.log")"
    start mariadbd mariadbd --defaults-file="$STATE/database/mariadb.cnf"
    wait_for 30 test -S "$STATE/database/socket" || fail "MariaDB does not start"
    start_accounting
    sacctmgr --immediate --quiet add cluster headway
    sacctmgr --immediate --quiet add account "$ACCOUNT" Description=local Organization=local
    sacctmgr --immediate --quiet add user "$ME" Account="$ACCOUNT"
    sacctmgr --immediate --quiet modify user "$ME" set DefaultAccount="$ACCOUNT"
} >>"$STATE/log/accounts.out"

all_idle() { [[ $(sinfo --noheader --Node --partition=preemptible --states=idle --format=%N | wc -l) == $((NINF + NTRN)) ]]; }

watch_owner() { # PID: ends the cluster when that process is gone, however it went
    # shellcheck disable=SC2016
    start owner env HEADWAY_SLURM_DIR="$STATE" bash -c 'tail -s 1 --pid="$1" -f /dev/null; exec "$2"' _ "$1" "$HERE/down.sh"
}

clean_up() { say "slurm/local: not started; the ends of its logs:"; tail -qn 3 "$STATE"/log/*.{log,out} >&2 || true; "$HERE/down.sh"; }

export SLURM_CONF=$STATE/etc/slurm.conf
if [[ -e $STATE/settings ]] && controller_answers 2>/dev/null; then
    diff <(settings_text) <(grep -v '^SLOT=' "$STATE/settings") >&2 || fail "already up with other settings: slurm/local/down.sh first"
    say "already up"
    echo "export SLURM_CONF=$SLURM_CONF"
    exit
fi
"$HERE/install.sh"
[[ -e $STATE/settings || -z $(ls -A "$STATE" 2>/dev/null) ]] || fail "$STATE holds other things: choose another HEADWAY_SLURM_DIR"
"$HERE/down.sh" # what a crash may have left
mkdir -p "$STATE"
chmod go-w "$STATE"
check_owner # somebody may have been faster
mkdir "$STATE"/{etc,log,run,munge,controller,nodes,database}
settings_text >"$STATE/settings"
trap clean_up EXIT
claim_slot
write_configuration
start_munge
start_database
start_controller
for node in $(node_names); do node_on "$node"; done
wait_for 40 all_idle || fail "not all nodes are idle: $(sinfo --noheader --Node --format='%N %T' | sort -u | tr '\n' ' ')"
[[ -n ${OWNER:-} ]] && watch_owner "$OWNER"
trap - EXIT
echo "export SLURM_CONF=$SLURM_CONF"
