#!/usr/bin/env bash
# End a local cluster, whatever state it is in, and remove everything of it: processes, namespaces, bridge, cgroups, its folder.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$HERE/nodes.sh"

[[ -e $STATE/settings ]] || exit 0
# shellcheck source=/dev/null
. "$STATE/settings"
if running owner && [[ $(<"$STATE/run/owner.pid") != "$$" ]]; then
    pkill -P "$(<"$STATE/run/owner.pid")" || true
    stop owner
fi
# The nodes first, hard: no job has a chance to be requeued, and nothing waits for anything.
if [[ -n ${SLOT:-} ]]; then
    for node in $(node_names); do node_off "$node"; done
    if ((ISOLATE)); then
        remove_cgroups "hws$SLOT" || fail "$CGROUPS/*/hws$SLOT: some processes are still there"
        ip link delete "hws$SLOT" 2>/dev/null || true
    fi
fi
for daemon in slurmctld slurmdbd mariadbd munged; do stop "$daemon"; done
rm -rf "$STATE"
