#!/usr/bin/env bash
# node.sh off|on|cut|join|kill NAME: a power cut of a node, and power again; its network cable out (it runs on), and in again;
#   KILL for all processes of jobs on it.
# node.sh stop|start controller|database: slurmctld or slurmdbd away (jobs run on), and back.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$HERE/nodes.sh"

[[ -e $STATE/settings ]] || fail "no cluster in $STATE: slurm/local/up.sh first"
# shellcheck source=/dev/null
. "$STATE/settings"

case ${1:-}:${2:-} in
stop:controller) stop slurmctld; exit ;;
start:controller) running slurmctld || start_controller; exit ;;
stop:database) stop slurmdbd; exit ;;
start:database) running slurmdbd || start_accounting; exit ;;
esac
names=$(node_names | tr '\n' ' ')
[[ -n ${2:-} && " $names" == *" $2 "* ]] || fail "no node '${2:-}': use one of $names"
case $1 in
off) node_off "$2" ;;
on) node_on "$2" ;;
kill) node_kill "$2" ;;
cut | join)
    ((ISOLATE)) || fail "cutting the network off needs nodes with a network of their own: run as root"
    [[ $1 == cut ]] && direction=down || direction=up
    ip link set "hws$SLOT-$2" "$direction"
    ;;
*) fail "unknown: $1. Use off, on, cut, join or kill" ;;
esac
