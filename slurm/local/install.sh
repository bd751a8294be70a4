#!/usr/bin/env bash
# Install what a local cluster needs, if it is missing: Debian's or Ubuntu's packages, and only as root; otherwise say what is missing.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

PACKAGES="slurmctld slurmd slurm-client slurmdbd munge mariadb-server-core"
needed=(munged slurmctld slurmd slurmdbd sacctmgr mariadbd)
((ISOLATE)) && needed+=(ip nsenter unshare)

missing=()
for program in "${needed[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
((${#missing[@]} == 0)) && exit 0

if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    fail "missing: ${missing[*]}. Install these packages (names as in Debian and Ubuntu), which needs root: $PACKAGES iproute2"
fi
say "installing SLURM: missing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d # keeps the packages from starting their services
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086
apt-get install -qq -y --no-install-recommends $PACKAGES iproute2 >&2 || {
    apt-get update -qq >&2
    apt-get install -qq -y --no-install-recommends $PACKAGES iproute2 >&2
}
