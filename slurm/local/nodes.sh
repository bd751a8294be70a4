# shellcheck shell=bash
# Sourced after settings.sh: the nodes. With ISOLATE=1 a node is a host of its own: namespaces for network, host name, processes,
# mounts and cgroups, an address on the bridge hws$SLOT, its own /dev/shm. /tmp and all other files are shared by all nodes.

node_names() { local i; for ((i = 0; i < NINF; i++)); do echo "inf$i"; done; for ((i = 0; i < NTRN; i++)); do echo "trn$i"; done; }

node_number() { [[ $1 == inf* ]] && echo $((10 + ${1#inf})) || echo $((100 + ${1#trn})); }

port() { echo $((16817 + 250 * SLOT + $1)); } # 0 the controller, 1 the database, 2 slurmd; below the ports that systems give out themselves

node_address() { # NAME: what slurm.conf says of where it is
    if ((ISOLATE)); then
        echo "NodeHostname=$1 NodeAddr=10.77.$SLOT.$(node_number "$1") Port=$(port 2)"
    else
        echo "NodeHostname=localhost NodeAddr=127.0.0.1 Port=$(port "$(node_number "$1")")"
    fi
}

write_hosts() {
    local name
    echo "127.0.0.1 localhost"
    echo "10.77.$SLOT.1 $(hostname -s)"
    for name in $(node_names); do echo "10.77.$SLOT.$(node_number "$name") $name"; done
}

CGROUPS=/sys/fs/cgroup

uses_cgroups() { ((ISOLATE)) && [[ -d $CGROUPS/freezer && -d $CGROUPS/memory ]]; } # version 1; otherwise processes are tracked by their parents

node_on() { # NAME
    running "$1" && return
    mkdir -p "$STATE/nodes/$1"
    if ((!ISOLATE)); then
        (cd "$STATE/nodes/$1" && start "$1" slurmd -D -b -f "$STATE/etc/slurm.conf" -N "$1")
        return
    fi
    local link=hws$SLOT-$1 controller
    ip netns add "$link"
    ip link add "$link" type veth peer name eth0 netns "$link"
    ip link set "$link" master "hws$SLOT" up
    ip -n "$link" address add "10.77.$SLOT.$(node_number "$1")/24" dev eth0
    ip -n "$link" link set lo up
    ip -n "$link" link set eth0 up
    ip -n "$link" route add default via "10.77.$SLOT.1"
    local -a namespaces=(--uts --mount --pid --fork --kill-child --mount-proc)
    uses_cgroups && namespaces+=(--cgroup)
    (
        if uses_cgroups; then
            for controller in freezer memory; do
                mkdir -p "$CGROUPS/$controller/hws$SLOT/$1"
                echo "$BASHPID" >"$CGROUPS/$controller/hws$SLOT/$1/cgroup.procs"
            done
        fi
        # Not "ip netns exec": that hides /sys/fs/cgroup.
        start "$1" nsenter --net="/run/netns/$link" unshare "${namespaces[@]}" bash "$HERE/boot.sh" "$STATE" "$1" "hws$SLOT/$1"
    )
}

node_off() { # NAME: a power cut: nothing on it runs on, says good-bye or closes a connection
    if ((ISOLATE)); then
        ip link set "hws$SLOT-$1" down 2>/dev/null || true
        stop "$1" KILL
        thaw "hws$SLOT/$1"
        ip netns delete "hws$SLOT-$1" 2>/dev/null || true
        ip link delete "hws$SLOT-$1" 2>/dev/null || true
        wait_for 15 remove_cgroups "hws$SLOT/$1" || fail "node $1: some of its processes are still there"
    else
        stop "$1" KILL
        local pid
        for pid in $(step_daemons "$1"); do kill_tree "$pid"; done
    fi
}

node_kill() { # NAME: KILL for every process of jobs; SLURM finds them ended
    local daemon pid
    if uses_cgroups; then
        # shellcheck disable=SC2038  # process numbers
        find "$CGROUPS/freezer/hws$SLOT/$1" -path '*/step_*/cgroup.procs' -exec cat {} + 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
    else
        for daemon in $(step_daemons "$1"); do
            for pid in $(pgrep -P "$daemon"); do kill_tree "$pid"; done
        done
    fi
}

step_daemons() { # NAME: the processes of SLURM that look after jobs on it, where nodes share a host; each works in its node's folder
    local pid
    for pid in $(pgrep -u "$ME" slurmstepd); do
        if [[ $(readlink "/proc/$pid/cwd") == "$STATE/nodes/$1" ]]; then echo "$pid"; fi
    done
}

thaw() { # GROUP: what SLURM has suspended there can end
    uses_cgroups || return 0
    find "$CGROUPS/freezer/$1" -name freezer.state -exec sh -c 'echo THAWED >"$1"' _ {} \; 2>/dev/null || true
}

remove_cgroups() { # GROUP: succeeds when no process is left in it
    local controller
    uses_cgroups || return 0
    for controller in freezer memory; do
        [[ -d $CGROUPS/$controller/$1 ]] || continue
        find "$CGROUPS/$controller/$1" -depth -type d -exec rmdir {} + || return 1
    done
}

kill_tree() { # PID: it and all its descendants, none of which may start another meanwhile
    local child
    kill -STOP "$1" 2>/dev/null || return 0
    for child in $(pgrep -P "$1"); do kill_tree "$child"; done
    kill -KILL "$1" 2>/dev/null || true
}
